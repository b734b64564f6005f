"""Run the operator's simulation by hand: one seed with its log, or many on all cores.

    python tests/simulation/operator_simulate.py --seed 7 [--verbose]
    python tests/simulation/operator_simulate.py --seeds 0:1000 [--keep-going] [--then --seeds ...]

--regression: the disturbances are those of a scenario that went wrong once; with --seeds, "all" is each of them.
--grids: the coordinator chooses the grid of each job, of all that its workers can run.
--queues: the job is in a queue of Kueue, whose manager is played.
--then: what follows is done next, in the same process; a line that begins with $ is before each.
"""

import argparse
import multiprocessing
import os
import sys

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    # a run is a function of its seed only with the same order of sets; before all that takes long to import
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from opsim_scenario import REGRESSIONS, ClusterScenario, regression, scenario
from opsim_simulation import OperatorSimulation, RunResult
from sim_many import report, spare_the_collector

ALL, THEN = "all", "--then"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is done with each seed; see the flags."""

    regression: str | None
    grids: bool
    queues: bool

    def scenario(self, seed: int) -> ClusterScenario:
        if self.regression:
            return regression(self.regression, seed, chooses=self.grids)
        return scenario(seed, chooses=self.grids, queued=self.queues)

    def command(self, seed: int) -> str:
        flags = f' --regression "{self.regression}"' if self.regression else ""
        flags += " --grids" * self.grids + " --queues" * self.queues
        return f"python tests/simulation/operator_simulate.py --seed {seed}{flags} --verbose"


def run_seed(trial: Trial, seed: int) -> RunResult:
    torch.set_num_threads(1)
    return OperatorSimulation(trial.scenario(seed)).run()


def _alone(trial: Trial, seed: int) -> list[RunResult]:
    return [run_seed(trial, seed)]


def _trial(arguments: argparse.Namespace, name: str | None) -> Trial:
    return Trial(regression=name, grids=arguments.grids, queues=arguments.queues)


def one(arguments: argparse.Namespace) -> int:
    trial = _trial(arguments, arguments.regression)
    wanted = trial.scenario(arguments.seed)
    print(wanted)
    for disturbance in wanted.disturbances:
        print(f"  {disturbance}")
    result = OperatorSimulation(wanted, print if arguments.verbose else None).run()
    print(f"{result.kind} after {result.seconds:.1f} virtual seconds")
    if result.problem:
        print(f"PROBLEM: {result.problem}")
    return 1 if result.problem else 0


def many(arguments: argparse.Namespace) -> int:
    first, last = map(int, arguments.seeds.split(":"))
    wrong = 0
    with multiprocessing.Pool(arguments.processes) as pool:
        for name in REGRESSIONS if arguments.regression == ALL else (arguments.regression,):
            trial = _trial(arguments, name)
            results = pool.imap_unordered(partial(_alone, trial), range(first, last))
            wrong |= report(results, trial.command, arguments.keep_going)
            if wrong and not arguments.keep_going:
                break
    return wrong


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="A:B, the half-open range")
    parser.add_argument("--regression", choices=(*REGRESSIONS, ALL))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--grids", action="store_true", help="the coordinator chooses stages and pipelines")
    parser.add_argument("--queues", action="store_true", help="the job is in a queue of Kueue")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args(given)
    if (arguments.seed is None) == (arguments.seeds is None):
        parser.error("give either --seed or --seeds")
    if arguments.seed is not None and arguments.regression == ALL:
        parser.error("--regression all goes with --seeds")
    return one(arguments) if arguments.seeds is None else many(arguments)


def one_after_the_other(given: Sequence[str]) -> int:
    failed, rest = 0, list(given)
    while rest:
        here = rest.index(THEN) if THEN in rest else len(rest)
        print("$", *rest[:here], flush=True)
        failed |= main(rest[:here])
        rest = rest[here + 1 :]
    return failed


if __name__ == "__main__":
    spare_the_collector()
    sys.exit(one_after_the_other(sys.argv[1:]) if THEN in sys.argv else main(sys.argv[1:]))
