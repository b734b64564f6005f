"""Run the operator's simulation by hand: one seed with its story, or many on all cores.

    python tests/simulation/operator_simulate.py --seed 7 [--verbose]
    python tests/simulation/operator_simulate.py --seeds 0:1000 [--keep-going]

--story: what befalls the job is not drawn, but one of those that went wrong once.
"""

import argparse
import multiprocessing
import os
import sys
from functools import partial

import torch

from opsim_acts import NAMED, Story, named, story
from opsim_world import Verdict, World
from sim_many import tell


def told(seed: int, name: str | None) -> Story:
    return named(name, seed) if name else story(seed)


def run_seed(seed: int, name: str | None) -> Verdict:
    torch.set_num_threads(1)
    return World(told(seed, name)).run()


def command(seed: int, name: str | None) -> str:
    story_flag = f' --story "{name}"' if name else ""
    return f"python tests/simulation/operator_simulate.py --seed {seed}{story_flag} --verbose"


def _alone(seed: int, name: str | None) -> list[Verdict]:
    return [run_seed(seed, name)]


def one(arguments: argparse.Namespace) -> int:
    what = told(arguments.seed, arguments.story)
    print(what)
    for act in what.acts:
        print(f"  {act}")
    result = World(what, print if arguments.verbose else None).run()
    print(f"{result.kind} after {result.seconds:.1f} virtual seconds")
    if result.problem:
        print(f"PROBLEM: {result.problem}")
    return 1 if result.problem else 0


def many(arguments: argparse.Namespace) -> int:
    first, last = map(int, arguments.seeds.split(":"))
    run = partial(_alone, name=arguments.story)
    with multiprocessing.Pool(arguments.processes) as pool:
        replay = partial(command, name=arguments.story)
        return tell(pool.imap_unordered(run, range(first, last)), replay, arguments.keep_going)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="A:B, the half-open range")
    parser.add_argument("--story", choices=NAMED)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if (arguments.seed is None) == (arguments.seeds is None):
        parser.error("give either --seed or --seeds")
    return one(arguments) if arguments.seeds is None else many(arguments)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # a run is a function of its seed only with the same order of sets
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
    sys.exit(main())
