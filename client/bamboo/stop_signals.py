"""Handling of SIGINT, SIGTERM and SIGHUP at each stage of a command.

Before a command begins, and when it has closed everything, a signal ends the process at once. While the command works,
a signal raises SystemExit, so that open resources are closed. Signals are held where an exception would leave work half
done, as in asyncio (`loop_signals`). A held signal is raised later, unless `loop_signals.taken` has handled it.
"""

import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import FrameType

from bamboo_core.names import EXIT_INTERRUPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """Make stop signals end the process at once, silently, with EXIT_INTERRUPTED.

    During an import SystemExit would be reported as an error, and at the interpreter's exit it would be lost.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_INTERRUPTED))


def end_by_exception() -> None:
    """Make stop signals raise SystemExit with EXIT_INTERRUPTED in the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(EXIT_INTERRUPTED))


class Held:
    """A handler that holds stop signals: it only records their numbers."""

    def __init__(self) -> None:
        self.noted: deque[int] = deque()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold stop signals in the block; at its end raise the first one that `loop_signals.taken` has not handled.

    Within another `held`, the inner one takes over the signals that the outer one holds. Outside the main thread it
    does nothing, since only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    keeper = Held()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, keeper)
        outer = before[signal.SIGINT]  # one handler holds all signals
        if isinstance(outer, Held):
            keeper.noted.extend(outer.noted)
            outer.noted.clear()
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if keeper.noted:
            signal.raise_signal(keeper.noted[0])
