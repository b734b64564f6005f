"""A bar for what takes long, as runs that are simulated, on standard error if that is a terminal."""

import sys
from types import TracebackType

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


class RunProgress:
    """A bar that shows on a terminal how many of `runs` are done; of a single run nobody knows how far it is. `about`
    says what is done. The bar leaves nothing behind on the screen.
    """

    def __init__(self, runs: int, about: str = "simulating", *, shown: bool = True) -> None:
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
        """Counts so many more runs as done."""
        self._bar.advance(self._task, runs)
