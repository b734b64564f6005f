"""Run the protocol simulation by hand: one seed with its log, or many on all cores.

    python tests/simulation/simulate.py --seed 7 [--verbose] [--faults 0,2] [--shrink]
    python tests/simulation/simulate.py --seeds 0:100000 [--keep-going]
    python tests/simulation/simulate.py --seeds 0:1000 --record FILE

Each kind of scenario has a flag; any of them go together.
--record: a line per seed with a hash of its events (every frame that is sent, every instruction and message, with their
times): a change that is to change no behaviour leaves the file as it was.
"""

import argparse
import hashlib
import multiprocessing
import os
import sys
from dataclasses import replace

import torch

from sim_checks import RunResult
from sim_faults import Scenario, scenario
from sim_job import Simulation
from sim_kinds import Kind, flags
from sim_many import report, spare_the_collector

BATCH = 20


def run_scenario(job: Scenario) -> RunResult:
    return Simulation(job).run()


def run_seed(seed: int, *kinds: Kind) -> RunResult:
    return run_scenario(scenario(seed, *kinds))


def command(seed: int, *kinds: Kind) -> str:
    return f"python tests/simulation/simulate.py --seed {seed}{flags(kinds)} --verbose"


def kinds_of(arguments: argparse.Namespace) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if getattr(arguments, kind))


def shrink(job: Scenario) -> Scenario:
    """Drop faults as long as the run still fails."""
    smaller = True
    while smaller:
        smaller = False
        for i in range(len(job.faults)):
            fewer = replace(job, faults=job.faults[:i] + job.faults[i + 1 :])
            if run_scenario(fewer).problem:
                job, smaller = fewer, True
                break
    return job


def one(arguments: argparse.Namespace) -> int:
    job = scenario(arguments.seed, *kinds_of(arguments))
    if arguments.faults is not None:
        kept = [int(i) for i in arguments.faults.split(",") if i]
        job = replace(job, faults=tuple(job.faults[i] for i in kept))
    if arguments.shrink:
        job = shrink(job)
    full = scenario(arguments.seed, *kinds_of(arguments)).faults
    print(job)
    for fault in job.faults:
        print(f"  fault {full.index(fault)}: {fault}")
    simulation = Simulation(job, print if arguments.verbose else None)
    result = simulation.run()
    print(f"{result.kind} after {result.seconds:.2f} virtual seconds, {result.struck} faults struck")
    if result.problem:
        print(f"PROBLEM: {result.problem}")
    return 1 if result.problem else 0


def events_hash(job: Scenario) -> str:
    """A hash of everything that happens in that run, in order, and of what is wrong with it."""
    told = hashlib.sha256()
    result = Simulation(job, lambda line: told.update(f"{line}\n".encode())).run()
    return told.hexdigest()[:16] + (f" PROBLEM: {result.problem}" if result.problem else "")


def _hashes(task: tuple[range, tuple[Kind, ...]]) -> list[str]:
    torch.set_num_threads(1)
    seeds, kinds = task
    return [f"{seed} {events_hash(scenario(seed, *kinds))}\n" for seed in seeds]


def record(arguments: argparse.Namespace) -> int:
    wrong = 0
    with multiprocessing.Pool(arguments.processes) as pool, open(arguments.record, "w") as file:
        for lines in pool.imap(_hashes, batches(arguments)):
            wrong += sum("PROBLEM" in line for line in lines)
            file.writelines(lines)
            file.flush()
    return 1 if wrong else 0


def batches(arguments: argparse.Namespace) -> list[tuple[range, tuple[Kind, ...]]]:
    first, last = map(int, arguments.seeds.split(":"))
    starts = range(first, last, BATCH)
    return [(range(a, min(a + BATCH, last)), kinds_of(arguments)) for a in starts]


def _batch(task: tuple[range, tuple[Kind, ...]]) -> list[RunResult]:
    torch.set_num_threads(1)
    seeds, kinds = task
    return [run_seed(seed, *kinds) for seed in seeds]


def many(arguments: argparse.Namespace) -> int:
    kinds = kinds_of(arguments)
    with multiprocessing.Pool(arguments.processes) as pool:
        return report(
            pool.imap_unordered(_batch, batches(arguments)), lambda seed: command(seed, *kinds), arguments.keep_going
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="A:B, the half-open range")
    parser.add_argument("--faults", help="only those of the seed's faults, by number")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--shrink", action="store_true", help="drop faults while the run still fails")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--record", metavar="FILE", help="write a hash of each seed's events")
    for kind in Kind:
        parser.add_argument(f"--{kind}", action="store_true", help=kind.help)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if (arguments.seed is None) == (arguments.seeds is None):
        parser.error("give either --seed or --seeds")
    if arguments.seeds is None:
        return one(arguments)
    return record(arguments) if arguments.record else many(arguments)


if __name__ == "__main__":
    spare_the_collector()
    sys.exit(main())
