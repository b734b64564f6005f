"""Random numbers of Python and numpy that a layer draws although nobody seeds their generators."""

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(slots=True)
class Draws:
    """The generators that several runs of a layer have drawn from.

    They count even if the numbers make no difference now: a layer that is left out one time in ten is left in twice.
    quiet: keeps other threads from drawing from numpy's generator, which all threads share.
    """

    quiet: Callable[[], AbstractContextManager[None]]
    runs: list[set[str]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record, in this context, what this thread draws: the control channel draws numbers, too."""
        found: set[str] = set()
        seeded = False

        def called(_frame: object, event: str, function: Any) -> None:
            nonlocal seeded
            if event != "c_call" or getattr(function, "__self__", None) is not _GLOBAL:
                return
            seeded = seeded or function.__name__ in ("seed", "setstate")
            if not seeded and function.__name__ in ("random", "getrandbits"):
                found.add("Python's random")

        with self.quiet():
            before, profiled = _numpy_state(), sys.getprofile() is not None
            if not profiled:  # whoever profiles a worker keeps the profiler; some cannot be set again
                sys.setprofile(called)
            try:
                yield
            finally:
                if not profiled:
                    sys.setprofile(None)
            if _numpy_state() != before:
                found.add("numpy.random")
            self.runs.append(found)

    def each_time(self) -> str:
        """Return the generators that every run drew from. The state of numpy's stays the same from the second run on
        if each run seeds it.
        """
        return " and ".join(sorted(set.intersection(*self.runs))) if self.runs else ""


_GLOBAL: Final = getattr(random.random, "__self__", None)  # the generator behind the module's functions


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    return pickle.dumps(numpy.get_state(legacy=False))
