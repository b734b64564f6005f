"""The progress of a command that reads or writes for a while."""

import sys
import time
from collections.abc import Callable
from typing import Final

LINE_SECONDS: Final = 5.0  # between two lines of progress that is not shown on a terminal


class ProgressLine:
    """A line on standard error: on a terminal it changes, elsewhere new lines follow from time to time.

    text: describes how much is done of how much. Where lines follow, the last one says that all is done.
    """

    def __init__(self, text: Callable[[int, int], str]) -> None:
        self._text, self._terminal, self._last = text, sys.stderr.isatty(), time.monotonic()
        self._told = False  # a line was printed

    def __call__(self, done: int, of: int) -> None:
        text = self._text(done, of)
        if self._terminal:
            print(f"\r{text}   ", end="\n" if done == of else "", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > LINE_SECONDS or (done == of and self._told):
            self._last, self._told = time.monotonic(), True
            print(text, file=sys.stderr, flush=True)
