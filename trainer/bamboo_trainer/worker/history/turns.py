"""Turns: calls of a function by a thread that is woken, or at the latest after a time."""

import threading
from collections.abc import Callable
from typing import Protocol

Turn = Callable[[bool], None]  # with whether it is the last one


class Turns(Protocol):
    """Calls the turns of a part of the history, from the first `wake` on."""

    def wake(self) -> None:
        """Call the next turn now."""

    def end(self) -> None:
        """Call the last turn now, and none after it."""

    def join(self, seconds: float) -> None:
        """Wait that long for the last turn to end."""


MakeTurns = Callable[[Turn, float, str], Turns]


class TurnThread:
    """A thread that calls turns. seconds: between two turns at most. name: the thread's."""

    def __init__(self, turn: Turn, seconds: float, name: str) -> None:
        self._turn, self._seconds = turn, seconds
        self._changed = threading.Condition()
        self._due = self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake(self) -> None:
        with self._changed:
            self._due = True
            self._changed.notify_all()
            if self._thread.ident is None:
                self._thread.start()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ended, self._seconds)
                last, self._due = self._ended, False
            self._turn(last)
