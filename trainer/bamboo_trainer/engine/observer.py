"""The seam by which an engine reports its work."""

from typing import Protocol

from bamboo_core.planning.plan import Cell


class Observer(Protocol):
    """Called before and after every instruction: `telemetry.spans`, and the fault injection of the tests.

    event: Idle (nothing that must be done is ready), Epoch (a plan came into force), Takeover, Move (at a boundary).
    """

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def event(self, name: str, **facts: object) -> None: ...
