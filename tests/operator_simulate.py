"""Run the operator's simulation by hand: one seed with its story, or many on all cores.

    python tests/operator_simulate.py --seed 7 [--verbose]
    python tests/operator_simulate.py --seeds 0:1000 [--keep-going]

--story: what befalls the job is not drawn, but one of those that went wrong once.
"""

import argparse
import collections
import multiprocessing
import os
import sys
import time
from functools import partial

import torch

from opsim_acts import NAMED, Story, named, story
from opsim_world import Verdict, World


def told(seed: int, name: str | None) -> Story:
    return named(name, seed) if name else story(seed)


def run_seed(seed: int, name: str | None) -> Verdict:
    torch.set_num_threads(1)
    return World(told(seed, name)).run()


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
    kinds: collections.Counter[str] = collections.Counter()
    failed, began = 0, time.monotonic()
    run = partial(run_seed, name=arguments.story)
    story_flag = f' --story "{arguments.story}"' if arguments.story else ""
    with multiprocessing.Pool(arguments.processes) as pool:
        for done, verdict in enumerate(pool.imap_unordered(run, range(first, last)), start=1):
            kinds[verdict.kind] += 1
            if verdict.problem:
                failed += 1
                print(f"\nseed {verdict.seed}: {verdict.problem.splitlines()[0][:300]}")
                print(f"  python tests/operator_simulate.py --seed {verdict.seed}{story_flag} --verbose")
            rate = done / (time.monotonic() - began)
            print(f"\r{done} runs, {rate:.2f}/s, {dict(kinds)}, {failed} failed ", end="", flush=True)
            if failed and not arguments.keep_going:
                pool.terminate()
                break
    print()
    return 1 if failed else 0


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
