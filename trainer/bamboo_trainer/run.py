"""A cell's work on one step."""

from dataclasses import dataclass, field

from torch import Tensor

from bamboo.plan import Cell, Layout, WorkerId
from bamboo_trainer.frames import Address, Frame
from bamboo_trainer.schedule import Backward, Forward, Instruction, program
from bamboo_trainer.stage import Stage, Work


@dataclass(slots=True)
class Catching:
    """A takeover in progress: when the plan came and was applied (seconds), and what was repeated since."""

    arrived: float
    applied: float
    forwards: int = 0
    backwards: int = 0

    def count(self, instruction: Instruction) -> None:
        self.forwards += isinstance(instruction, Forward)
        self.backwards += isinstance(instruction, Backward)


@dataclass(slots=True)
class Run:
    """predecessor: the live worker that ran the cell before and still owes its last gradients.

    since: the step with which this worker began to run the cell. logged: the same of the cells that feed this one.
    """

    cell: Cell
    step: int = -1
    layout: Layout | None = None
    program: list[Instruction] = field(default_factory=list)
    done: int = 0
    work: Work | None = None
    final: Tensor | None = None
    inbox: dict[Address, Frame] = field(default_factory=dict)
    consumed: set[Address] = field(default_factory=set)
    predecessor: WorkerId | None = None
    catching: Catching | None = None
    finished: bool = False
    since: int = 0
    logged: dict[Cell, int] = field(default_factory=dict)

    def start(self, stage: Stage, stages: int, layout: Layout | None, tied: bool) -> None:
        """Begin the step that the stage's version is ready for, with nothing done yet. No layout: wait for it."""
        self.step, self.layout, self.done, self.final = stage.version, layout, 0, None
        active = layout is not None and self.cell.pipeline < layout.pipelines
        self.program = program(self.cell, stages, layout, tied) if layout and active else []
        self.work = stage.begin()
        self.inbox = {a: f for a, f in self.inbox.items() if a.step >= self.step}
        self.consumed.clear()

    def accept(self, frame: Frame) -> None:
        """Keep what is new; the first copy wins."""
        address = frame.address
        if address.step >= self.step and address not in self.consumed:
            self.inbox.setdefault(address, frame)

    def take(self, address: Address) -> Frame:
        self.consumed.add(address)
        return self.inbox.pop(address)

    @property
    def next(self) -> Instruction | None:
        return self.program[self.done] if self.done < len(self.program) else None
