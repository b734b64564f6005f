"""Run the operator's simulation by hand: one seed (--verbose: with its log), or many on all cores.

    python tests/simulation/operator_simulate.py --seed 7 [--verbose]
    python tests/simulation/operator_simulate.py --seeds 0:1000 [--keep-going] [--then --seeds ...]

--regression: repeats the disturbances of a scenario that failed once; with --seeds, "all" repeats each such scenario.
--grids: the coordinator chooses the grid (stages and pipelines) of each job among all that its workers can run.
--queues: the job is in a queue of Kueue, whose manager is simulated; not allowed with --regression.
--then: separates commands, which run one after the other in one process; each is printed before it runs, after a $.
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

import torch

from opsim_scenario import REGRESSIONS, ClusterScenario, regression, scenario
from opsim_simulation import OperatorSimulation
from sim_many import RunResult, command_line, report, seeds_of, spare_the_collector

ALL, THEN = "all", "--then"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The command line's choice of scenarios. regression: the name of a scenario that once failed, or None."""

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

    def run(self, seed: int) -> list[RunResult]:
        torch.set_num_threads(1)
        return [OperatorSimulation(self.scenario(seed)).run()]


def one(trial: Trial, arguments: argparse.Namespace) -> int:
    wanted = trial.scenario(arguments.seed)
    print(wanted)
    for disturbance in wanted.disturbances:
        print(f"  {disturbance}")
    result = OperatorSimulation(wanted, print if arguments.verbose else None).run()
    print(f"{result.kind} after {result.seconds:.1f} virtual seconds")
    if result.problem:
        print(f"PROBLEM: {result.problem}")
    return 1 if result.problem else 0


def many(trials: Sequence[Trial], arguments: argparse.Namespace) -> int:
    wrong = 0
    with multiprocessing.Pool(arguments.processes) as pool:
        for trial in trials:
            results = pool.imap_unordered(trial.run, seeds_of(arguments))
            wrong |= report(results, trial.command, arguments.keep_going)
            if wrong and not arguments.keep_going:
                break
    return wrong


def main(given: Sequence[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--regression", choices=(*REGRESSIONS, ALL))
    parser.add_argument("--grids", action="store_true", help="the coordinator chooses stages and pipelines")
    parser.add_argument("--queues", action="store_true", help="the job is in a queue of Kueue")
    arguments = parser.parse_args(given)
    if arguments.regression and arguments.queues:
        parser.error("--queues goes with no --regression, whose scenarios have none")
    names = REGRESSIONS if arguments.regression == ALL else (arguments.regression,)
    trials = [Trial(regression=name, grids=arguments.grids, queues=arguments.queues) for name in names]
    if arguments.seeds is not None:
        return many(trials, arguments)
    if len(trials) > 1:
        parser.error("--regression all goes with --seeds")
    return one(trials[0], arguments)


def one_after_the_other(given: Sequence[str]) -> int:
    """Run the commands that THEN separates, in order, and return 0 if all have succeeded."""
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
