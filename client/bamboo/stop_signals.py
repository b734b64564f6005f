"""The signals with which a person or a system stops a program, and what they do at each moment of its life.

While nothing has been begun, and when all is closed, the process ends on the spot. While a command works, SystemExit
goes through it, so that all that is open is closed. Where an exception would leave things half done signals are held;
that is so in the middle of asyncio (`loop_signals`). Each signal has its effect once, wherever it comes.
"""

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType

from bamboo_core.names import EXIT_INTERRUPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """Lets the process end without a word at a signal: in the middle of an import, or of the interpreter's end,
    SystemExit would be told as an error, or be lost.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_INTERRUPTED))


def end_by_exception() -> None:
    """Lets a signal raise SystemExit with EXIT_INTERRUPTED in the main thread, wherever that is."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(EXIT_INTERRUPTED))


class Held:
    """A handler that only notes what comes."""

    def __init__(self) -> None:
        self.noted: deque[int] = deque()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A time in which signals have no effect. The first that nobody has taken comes again at the end. Within such a
    time, what is held already can be taken, too.
    """
    keeper = Held()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, keeper)
        for outer in {id(one): one for one in before.values() if isinstance(one, Held)}.values():
            keeper.noted.extend(outer.noted)
            outer.noted.clear()
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if keeper.noted:
            signal.raise_signal(keeper.noted[0])
