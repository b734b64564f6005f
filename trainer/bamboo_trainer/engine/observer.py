"""What an engine tells of its work as it goes on."""

from typing import Protocol

from bamboo_core.planning.plan import Cell


class Observer(Protocol):
    """Told before and after every instruction: `telemetry.spans`, and the fault injection of the tests.

    event: Idle (nothing that must be done is ready), Epoch (a plan came into force), Takeover, Move (at a boundary).
    """

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def event(self, name: str, **facts: object) -> None: ...
