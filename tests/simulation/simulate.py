"""Run the protocol simulation by hand: one seed (--verbose: with its log), or many on all cores.

    python tests/simulation/simulate.py --seed 7 [--verbose] [--faults 0,2] [--shrink]
    python tests/simulation/simulate.py --seeds 0:100000 [--keep-going]
    python tests/simulation/simulate.py --seeds 0:1000 --record FILE

Each kind of scenario has a flag; flags can be combined.
--record: writes a line for each seed, with a hash of its events (every frame that is sent, every instruction and
message but heartbeats, with their times). A refactoring must leave the file unchanged.
"""

import argparse
import hashlib
import multiprocessing
import sys
from dataclasses import replace

import torch

from sim_faults import Scenario, scenario
from sim_job import Simulation
from sim_kinds import Kind, flags
from sim_many import RunResult, command_line, report, seeds_of, spare_the_collector

BATCH = 20  # seeds that a process runs before it reports


def command(seed: int, *kinds: Kind) -> str:
    """Return the command that runs this seed again and shows its log."""
    return f"python tests/simulation/simulate.py --seed {seed}{flags(kinds)} --verbose"


def kinds_of(arguments: argparse.Namespace) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if getattr(arguments, kind))


def shrink(job: Scenario) -> Scenario:
    """Drop faults from a failing scenario as long as its run still fails, and return the smaller scenario."""
    smaller = True
    while smaller:
        smaller = False
        for i in range(len(job.faults)):
            fewer = replace(job, faults=job.faults[:i] + job.faults[i + 1 :])
            if Simulation(fewer).run().problem:
                job, smaller = fewer, True
                break
    return job


def one(arguments: argparse.Namespace) -> int:
    full = scenario(arguments.seed, *kinds_of(arguments))
    job = full
    if arguments.faults is not None:
        kept = [int(i) for i in arguments.faults.split(",") if i]
        job = replace(job, faults=tuple(job.faults[i] for i in kept))
    if arguments.shrink:
        job = shrink(job)
    print(job)
    for fault in job.faults:
        print(f"  fault {full.faults.index(fault)}: {fault}")
    result = Simulation(job, print if arguments.verbose else None).run()
    print(f"{result.kind} after {result.seconds:.2f} virtual seconds, {result.struck} faults struck")
    if result.problem:
        print(f"PROBLEM: {result.problem}")
    return 1 if result.problem else 0


def events_hash(job: Scenario) -> str:
    """Return a hash of the events of the job's run, in order, followed by the run's problem, if any."""
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
    seeds, kinds = seeds_of(arguments), kinds_of(arguments)
    return [(seeds[first : first + BATCH], kinds) for first in range(0, len(seeds), BATCH)]


def _batch(task: tuple[range, tuple[Kind, ...]]) -> list[RunResult]:
    torch.set_num_threads(1)
    seeds, kinds = task
    return [Simulation(scenario(seed, *kinds)).run() for seed in seeds]


def many(arguments: argparse.Namespace) -> int:
    kinds = kinds_of(arguments)
    with multiprocessing.Pool(arguments.processes) as pool:
        return report(
            pool.imap_unordered(_batch, batches(arguments)), lambda seed: command(seed, *kinds), arguments.keep_going
        )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--faults", help="only these faults of the seed, by number")
    parser.add_argument("--shrink", action="store_true", help="drop faults while the run still fails")
    parser.add_argument("--record", metavar="FILE", help="write a hash of each seed's events")
    for kind in Kind:
        parser.add_argument(f"--{kind}", action="store_true", help=kind.help)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seeds is None:
        return one(arguments)
    return record(arguments) if arguments.record else many(arguments)


if __name__ == "__main__":
    spare_the_collector()
    sys.exit(main())
