"""Which instruction the engine's thread is inside, and since when: read by the thread that sends heartbeats.

A dataset that hangs, or a kernel that never ends, holds up the engine's thread and not the heartbeats.
"""

from collections.abc import Callable
from typing import NamedTuple

from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.observer import Observer

FIRST_CALLS = ("Rehearsal",)  # what they take says nothing


class Begun(NamedTuple):
    name: str
    cell: Cell
    step: int
    microbatch: int
    at: float

    def __str__(self) -> str:
        where = f"stage {self.cell.stage} of pipeline {self.cell.pipeline}"
        return f"inside {self.name} for {where}, step {self.step + 1}, microbatch {self.microbatch}"


class CurrentInstruction:
    """An observer that remembers what has begun and not ended, and passes on what it is told."""

    def __init__(self, observer: Observer, clock: Callable[[], float]) -> None:
        self._observer, self._clock = observer, clock
        self._begun: Begun | None = None

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._begun = None if name in FIRST_CALLS else Begun(name, cell, step, microbatch, self._clock())
        self._observer.started(name, cell, step, microbatch)

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._begun = None
        self._observer.finished(name, cell, step, microbatch)

    def event(self, name: str, **facts: object) -> None:
        self._observer.event(name, **facts)

    def now(self) -> tuple[str, float]:
        """The instruction in words, and for how many seconds it has run; nothing and 0 if none runs. May be called in
        any thread.
        """
        begun = self._begun
        return (str(begun), max(0.0, self._clock() - begun.at)) if begun else ("", 0.0)
