"""The command line of both simulators, and the results of many runs."""

import argparse
import collections
import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a simulated run, with its problem, if any."""

    seed: int
    kind: str  # how the run ended, for statistics
    problem: str | None  # what is wrong, or None
    seconds: float  # virtual
    struck: int = 0  # faults that happened


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that both simulators have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", help="A:B, the half-open range")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--keep-going", action="store_true", help="go on after a run that failed")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser


def seeds_of(arguments: argparse.Namespace) -> range:
    return range(*map(int, arguments.seeds.split(":")))


def spare_the_collector() -> None:
    """Exclude imported modules from garbage collections, which engines run when they drop states; run few others."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def report(batches: Iterable[Sequence[RunResult]], command: Callable[[int], str], keep_going: bool) -> int:
    """Print the results of runs until all have ended or, unless `keep_going`, one has failed; return the exit status.

    command: returns the command that replays a seed.
    """
    kinds: collections.Counter[str] = collections.Counter()
    done, failed, began = 0, 0, time.monotonic()
    for results in batches:
        done += len(results)
        kinds.update(v.kind for v in results)
        new = [v for v in results if v.problem]
        failed += len(new)
        for v in new:
            print(f"\nseed {v.seed}: {(v.problem or '').splitlines()[0][:300]}\n  {command(v.seed)}")
        rate = done / (time.monotonic() - began)
        print(f"\r{done} runs, {rate:.3g}/s, {dict(kinds)}, {failed} failed ", end="", flush=True)
        if failed and not keep_going:
            break
    print()
    return 1 if failed else 0
