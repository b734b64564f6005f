"""Many simulated runs: what came of them, as they end."""

import collections
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class RunResult(Protocol):
    """problem: what is wrong, or None. kind: how the run ended, for statistics."""

    @property
    def seed(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def problem(self) -> str | None: ...


def spare_the_collector() -> None:
    """Python's garbage collector never looks at what is imported by now: a worker that forgets its states collects."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def report(batches: Iterable[Sequence[RunResult]], command: Callable[[int], str], keep_going: bool) -> int:
    """Reports on runs until all have ended, or one has failed; returns the exit status. command: replays a seed."""
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
