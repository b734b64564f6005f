"""Finds owners that repeat a committed step and cannot complete it, because frames that they need are gone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bamboo_core.control.protocol import LeftBehind
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.commit.replicator import Replicator
from bamboo_trainer.frames.frame import ANSWERS_END, Address, Frame, FrameKind
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates


@dataclass(frozen=True, slots=True)
class Repeated:
    """A committed step of a cell that this worker repeats. lacks: the input frames that it still needs."""

    cell: Cell
    step: int
    lacks: Sequence[Address]


@dataclass(slots=True)
class Question:
    """A question to all workers. answers: by worker and link, the first logged step of each of its cells."""

    step: int
    epoch: int
    answers: dict[tuple[WorkerId, FrameKind], dict[Cell, int]] = field(default_factory=dict)


class RepeatedSteps:
    """Asks all workers once in an epoch, and reports to the coordinator a step that cannot be completed."""

    def __init__(
        self,
        plan: PlanState,
        outbox: Outbox,
        states: StageStates,
        replicator: Replicator,
        log: CommitLog,
        coordinator: Coordinator,
    ) -> None:
        self._plan, self._outbox, self._states, self._replicator = plan, outbox, states, replicator
        self._log, self._coordinator = log, coordinator
        self._questions: dict[Cell, Question] = {}
        self._asked: dict[Cell, int] = {}  # by cell, the newest committed step that its owner repeats

    def is_repeated(self, address: Address) -> bool:
        """Return whether a frame belongs to a committed step, which only the cell's owner may repeat."""
        return address.step <= max(self._log.newest, self._asked.get(address.cell, -1))

    def look(self, repeated: Iterable[Repeated], since: Mapping[Cell, int]) -> None:
        """Ask about repeated steps, report lost ones. since: for each of this worker's cells, the first logged step."""
        epoch = self._plan.current.epoch
        for one in repeated:
            question = self._questions.get(one.cell)
            if question is None or (question.step, question.epoch) != (one.step, epoch):
                question = self._questions[one.cell] = Question(one.step, epoch)
                for worker in sorted(self._plan.others()):
                    self._outbox.send(worker, self._outbox.frame(Address(FrameKind.ASK, *one.cell, one.step)))
            if one.step < self._log.newest or self._lacks_what_is_gone(one, question, since):
                self._coordinator.tell(LeftBehind(cell=one.cell))

    def ask_again(self) -> None:
        """Ask everything again after a broken link, which may have lost questions or answers."""
        self._questions.clear()

    def answer(self, worker: WorkerId, cell: Cell, step: int, since: Mapping[Cell, int]) -> None:
        """Send the owner of a cell that repeats a committed step all that may help it."""
        self._asked[cell] = max(step, self._asked.get(cell, -1))
        number = cell.stage
        if number in self._states and self._states.version(number) > step:
            self._replicator.send_state(cell, worker)
        elif self._states.has_final(number, step):
            self._replicator.send_final(worker, cell, step)
        self._outbox.resend(cell, worker)
        for kind in ANSWERS_END:
            self._outbox.send(worker, self._outbox.frame(Address(kind, *cell, step), payload=list(since.items())))

    def answered(self, worker: WorkerId, frame: Frame) -> bool:
        """Record the end of a worker's answer on one of its links. Return False if no such question is open."""
        question = self._questions.get(frame.address.cell)
        if question is None or (question.step, question.epoch) != (frame.address.step, frame.epoch):
            return False
        question.answers[worker, frame.address.kind] = dict(frame.payload)
        return True

    def _lacks_what_is_gone(self, one: Repeated, question: Question, since: Mapping[Cell, int]) -> bool:
        """Return whether, after all answers, the step still needs a frame that no worker has or will make again."""
        if not {(w, kind) for w in self._plan.others() for kind in ANSWERS_END} <= question.answers.keys():
            return False
        first = {cell: step for answer in question.answers.values() for cell, step in answer.items()} | dict(since)
        d, s = one.cell
        for address in one.lacks:
            senders = {
                FrameKind.ACTIVATION: Cell(d, s - 1),
                FrameKind.GRADIENT: Cell(d, s + 1),
                FrameKind.TIED: Cell(d, address.part),
            }
            sender = senders.get(address.kind)  # other pipelines have the same state, and send their part themselves
            if sender is not None and first.get(sender, 0) > one.step:
                return True
        return False
