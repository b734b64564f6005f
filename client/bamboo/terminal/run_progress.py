"""Progress of long work, such as simulated runs: a bar on a terminal, else lines on standard error."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bamboo_core.complaints import complain
from bamboo_core.text import count

SECONDS: Final = 30.0  # between lines


class RunProgress:
    """A progress bar over `runs`, or the elapsed time of a single run, after the text `about`.

    The bar is transient. Without a terminal, `done` prints a line at most every SECONDS. shown: False shows nothing.
    """

    def __init__(
        self, runs: int, about: str = "simulating", *, shown: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runs, self._about, self._clock = runs, about.strip(), clock
        self._done, self._printed = 0, clock()
        self._lines = shown and not sys.stderr.isatty()
        many = (MofNCompleteColumn(), TimeRemainingColumn()) if runs > 1 else (TimeElapsedColumn(),)
        columns = (SpinnerColumn(), TextColumn(about), BarColumn(), *many)
        hidden = not (shown and sys.stderr.isatty())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=runs if runs > 1 else None)

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def done(self, runs: int) -> None:
        """Count `runs` more runs as done."""
        self._bar.advance(self._task, runs)
        self._done += runs
        if self._lines and self._clock() - self._printed >= SECONDS:
            self._printed = self._clock()
            complain(f"{self._about}: {self._done} of {count(self._runs, 'run')}")
