"""A bar for runs that are simulated, on standard error if that is a terminal."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """Of so many runs. about: what is done. It leaves nothing behind on the screen."""

    def __init__(self, runs: int, about: str = "simulating", *, shown: bool = True) -> None:
        columns = (TextColumn(about), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = not (shown and sys.stderr.isatty())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=runs)

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def done(self, runs: int) -> None:
        """So many more are ready."""
        self._bar.advance(self._task, runs)
