"""Replication of stages: a cell's owner sends state and final gradients to replicas, and may wait for a replica.
`RepeatedSteps` asks for the frames that an owner lacks when it repeats a committed step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from bamboo_core.control.protocol import LeftBehind, ReplicaSynced
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_trainer.commit.ports import CommitContext
from bamboo_trainer.frames import ANSWERS_END, Address, Announce, Commits, Frame, FrameKind, ReplicaStart
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.task import Parts

CLOSE_STEPS = 2  # the owner waits once for a replica that lags by at most this number of steps
PATIENCE_STEPS = 16  # it also waits for a replica that has had a state for this number of steps and comes no closer


class Owed(Enum):
    """The data that an owner must send to a replica now."""

    NOTHING = auto()
    STATE = auto()  # the whole state, then the final gradients
    GRADIENTS = auto()  # the final gradients of the step in progress and of later ones


@dataclass(slots=True)
class ReplicaProgress:
    """The owner's record of one replica.

    epoch: the epoch of the plan with which the record begins; under an earlier plan the replica may report a state that
    it has since dropped. since: the first step whose final gradients it gets; None: it gets none. acked: the newest
    version it announced; -1: none. secured: the version it can reach, as it last announced. synced: it has once held
    the owner's version. level: it has once held the newest version of all parts of the stage (`_come_level`).
    """

    epoch: int = 0
    since: int | None = None
    acked: int = -1
    secured: int = -1
    synced: bool = False
    level: bool = False
    follows_from: int | None = None  # the owner's version when the replica first had all it needs to continue alone

    def announced(self, version: int, secured: int, mine: int) -> Owed:
        """Record the version that the replica announced, and return what to send it.

        version: held by the replica; -1: none. secured: the version that it can reach. mine: the owner's version.
        """
        self.secured = secured
        owed = self._owed(version, mine)
        reached = max(self.acked, self.secured)
        if self.follows_from is None and self.since is not None and reached >= self.since:
            self.follows_from = mine
        self.synced |= self.since is not None and self.acked >= mine
        return owed

    def _owed(self, version: int, mine: int) -> Owed:
        if version < 0 <= self.acked:  # a plan that this owner has never obeyed had dropped it as a replica
            self.since, self.acked, self.follows_from, self.synced, self.level = None, -1, None, False, False
        self.acked = max(self.acked, version)
        if self.since is not None and max(version, self.secured) >= self.since:
            return Owed.NOTHING
        if self.since is not None and version < 0:
            return Owed.NOTHING  # its state is on the way
        self.since, self.follows_from = max(version, mine), None
        if version < mine and self.secured < mine:
            return Owed.STATE
        return Owed.GRADIENTS

    def relinked(self, mine: int) -> Owed:
        """Return what to send the replica after a broken link may have lost frames, or the owner has skipped steps."""
        if self.since is None:
            return Owed.NOTHING
        if self.acked >= mine:
            return Owed.GRADIENTS
        self.since, self.follows_from = mine, None
        return Owed.STATE

    def holds_back(self, step: int, strict: bool) -> bool:
        """Return whether the owner must wait for the replica before it reports `step`. See docs/design/commit.md.

        The owner waits until a synced replica has the state before `step`; strict: and the step's final gradient. For
        one not synced yet, it waits only if that can continue alone and is at most CLOSE_STEPS behind or has been able
        to for PATIENCE_STEPS: if steps are shorter than a round trip, the replica never catches up by itself.
        """
        if self.synced:
            return self.acked < step or (strict and self.secured <= step)
        if self.follows_from is None or self.acked >= step:
            return False
        return step - self.acked <= CLOSE_STEPS or step - self.follows_from >= PATIENCE_STEPS


@dataclass(frozen=True, slots=True)
class ArrivedState:
    """A stage's state that arrives from another worker, layer by layer.

    wanted: the number of its layers. generation: the generation of the layout at the state's version.
    """

    cell: Cell
    version: int
    wanted: int
    generation: int
    layers: dict[int, LayerState] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.layers) == self.wanted


class Replicator:
    """Both ends of replication: the owner sends states and final gradients, and the replica receives them.

    progress: the record of each replica of this worker's cells. `finalize` only queues final gradients for
    `send_next`: a report that is ready goes first, because all workers wait for the commit.
    """

    def __init__(self, shared: CommitContext) -> None:
        self._shared, self._plan, self._outbox, self._states = shared, shared.plan, shared.outbox, shared.states
        self._log, self._coordinator = shared.log, shared.coordinator
        self.progress: dict[tuple[Cell, WorkerId], ReplicaProgress] = {}
        self._unsent: dict[tuple[Cell, WorkerId, int], None] = {}  # final gradients, by step; in order
        self._arrived: dict[int, ArrivedState] = {}  # for stages here, by stage, not adopted yet

    # as an owner

    def take_roles(self, old: Plan | None) -> None:
        """Under a new plan, start and drop records of replicas, and drop arriving states of stages no longer held here.

        old: the plan before; None for the first.
        """
        worker = self._plan.worker
        self._arrived = {stage: state for stage, state in self._arrived.items() if stage in self._states}
        was_mine = set(old.owned_by(worker)) if old else set()
        self.progress = {
            (cell, replica): (self.progress.get((cell, replica)) if cell in was_mine else None)
            or ReplicaProgress(self._plan.current.epoch)
            for cell in self._plan.current.owned_by(worker)
            for replica in self._plan.current.at(cell).replicas
        }

    def finalize(self, stage: int, step: int, final: Tensor) -> None:
        """Keep a step's final gradient for the state here, and queue it for replicas that need it (see `send_next`).

        final: from this worker or another one; ignored if one is kept already, or if the state is past the step.
        """
        if not self._states.keep_final(stage, step, final):
            return
        for (cell, replica), progress in self.progress.items():
            if cell.stage == stage and progress.since is not None and progress.since <= step:
                self._unsent[cell, replica, step] = None

    @property
    def owes_gradients(self) -> bool:
        return bool(self._unsent)

    def send_next(self) -> None:
        """Send the oldest queued final gradients unless they or their replica are gone. The queue must not be empty."""
        cell, replica, step = key = next(iter(self._unsent))
        del self._unsent[key]
        if (cell, replica) in self.progress and self._states.has_final(cell.stage, step):
            self.send_final(replica, cell, step)

    def hand_over(self, cell: Cell, worker: WorkerId, step: int) -> Frame:
        """Return a frame with the step's final gradients for the worker that takes over a cell. First send that worker
        the cell's gradients queued for it: it waits for them now, and `send_next` sends them only to replicas.
        """
        for key in [one for one in self._unsent if one[:2] == (cell, worker)]:
            del self._unsent[key]
            if self._states.has_final(cell.stage, key[2]):
                self.send_final(worker, cell, key[2])
        return self._outbox.frame(*self._final(cell, step))

    def send_final(self, worker: WorkerId, cell: Cell, step: int) -> None:
        """Send a step's final gradients to an owner or replica of the cell, once they are copied to host memory."""
        self._outbox.post(worker, *self._final(cell, step))

    def _final(self, cell: Cell, step: int) -> tuple[Address, Parts, Commits]:
        """Return address, tensors and payload of a frame with final gradients. The payload is the newest commits,
        because a replica that still gets its state may lack them.
        """
        final = self._states.final(cell.stage, step)
        assert final is not None
        return Address(FrameKind.SYNC, *cell, step), (final,), self._log.latest()

    def announced(self, cell: Cell, replica: WorkerId, epoch: int, announce: Announce) -> None:
        """Record what a replica announced. If the owner's state is here, send state or gradients that the replica
        lacks; if it becomes level, tell the coordinator. epoch: of its plan; if older than the record, do nothing.
        """
        progress, held = self.progress[cell, replica], self._states.here(cell.stage)
        if epoch < progress.epoch:
            return  # it announces again when it obeys that plan
        if held is None:
            progress.secured = announce.secured
            return
        self._send_owed(cell, replica, progress.announced(announce.version, announce.secured, held.version))
        if not progress.level and self._come_level(cell, replica):
            self._coordinator.tell(ReplicaSynced(cell=cell, replica=replica))

    def _come_level(self, cell: Cell, replica: WorkerId) -> bool:
        """Record a replica as level, and return True, if it has the newest version and final gradients of all parts of
        its owner's stage. The parts count together: with parts at different versions, the replica could not repeat
        a step after a loss, because the frames that the owner's parts had sent to each other would be lost, too.
        """
        cells = self._plan.parts(cell)
        parts = [self.progress[part, replica] for part in cells]
        newest = max(self._states.version(part.stage) for part in cells)
        if any(not part.synced or part.acked < newest for part in parts):
            return False
        finals = [self._states.final_steps(part.stage) for part in cells]
        if any(steps and one.secured <= steps[-1] for one, steps in zip(parts, finals, strict=True)):
            return False  # what it would have to repeat may be gone by then
        for part in parts:
            part.level = True
        return True

    def relinked(self, peer: WorkerId) -> None:
        """Send again the state or gradients that a broken link to that peer may have lost."""
        for (cell, replica), progress in self.progress.items():
            if replica == peer:
                self._send_owed(cell, replica, progress.relinked(self._states.version(cell.stage)))

    def skipped(self, stage: int) -> None:
        """After this owner has adopted a newer state of a stage from another worker, send its replicas the state or
        gradients that they lack: the owner has no final gradients of the steps in between to forward.
        """
        for (cell, replica), progress in self.progress.items():
            if cell.stage == stage:
                self._send_owed(cell, replica, progress.relinked(self._states.version(stage)))

    def _send_owed(self, cell: Cell, replica: WorkerId, owed: Owed) -> None:
        if self._states.here(cell.stage) is None or owed is Owed.NOTHING:
            return
        if owed is Owed.STATE:
            self.send_state(cell, replica)
        for step in self._states.final_steps(cell.stage):
            self._unsent.pop((cell, replica, step), None)
            self.send_final(replica, cell, step)

    def send_state(self, cell: Cell, worker: WorkerId) -> None:
        """Send a worker the whole state of a cell's stage, with one frame for each layer."""
        held = self._states[cell.stage]
        states = held.layer_states(held.layers_needed(), shown=False)
        filling = ReplicaStart(
            layers=len(states),
            generation=self._shared.generation(held.version),
            commits=self._log.latest(),
        )
        for layer, state in states.items():
            address = Address(FrameKind.LAYER, *cell, held.version, part=layer)
            payload = state.payload(filling=filling)
            self._outbox.send(worker, self._outbox.frame(address, state.tensors.values(), payload))

    def holds_back(self, cell: Cell, step: int, strict: bool) -> bool:
        """Return whether a replica keeps this step from being reported. strict: see `ReplicaProgress.holds_back`."""
        return any(p.holds_back(step, strict) for (c, _), p in self.progress.items() if c == cell)

    def synced(self) -> Iterator[tuple[Cell, WorkerId]]:
        """Return an iterator over (cell, replica) of each replica that has come level (`_come_level`)."""
        return (key for key, progress in self.progress.items() if progress.level)

    # as a replica

    def announce(self, stage: int) -> None:
        """Report the version of a stage's state here to the owners of the stage's cells that this worker replicates."""
        payload = Announce(version=self._states.version(stage), secured=self._states.secured(stage))
        for cell in self._plan.current.replicated_by(self._plan.worker):
            if cell.stage == stage:
                frame = self._outbox.frame(Address(FrameKind.ANNOUNCE, *cell, 0), payload=payload)
                self._outbox.send(self._plan.owner(cell), frame)

    def received(self, address: Address, final: Tensor) -> None:
        """Keep a final gradient from another worker, and announce the version that the stage's state here can reach."""
        self.finalize(address.stage, address.step, final)
        self.announce(address.stage)

    def layer_arrived(self, frame: Frame) -> None:
        """Store a layer of a stage's state that another worker has sent, for `next_state`.

        A newer version replaces an older one; layers of older versions are dropped.
        """
        address, filling = frame.address, frame.payload.filling
        state = self._arrived.get(address.stage)
        if state is None or state.version < address.step:
            state = ArrivedState(address.cell, address.step, filling.layers, filling.generation)
            self._arrived[address.stage] = state
        if state.version == address.step:
            state.layers[address.part] = LayerState.of(frame)

    def next_state(self) -> ArrivedState | None:
        """Remove and return a complete state that may be adopted now, else None. If a replica has parts on
        several devices, a newer state of one waits until the other states here can reach its version: with unequal
        versions, no part could repeat a step if the owner were lost.
        """
        number = next((n for n, state in self._arrived.items() if state.is_complete and self._may_take(n, state)), None)
        return None if number is None else self._arrived.pop(number)

    def _may_take(self, number: int, state: ArrivedState) -> bool:
        if self._plan.devices == 1 or self._states.here(number) is None or self._states.by_stage[number].owned:
            return True
        others = (part.stage for part in self._plan.parts(state.cell) if part.stage != number)
        held = (other for other in others if self._states.here(other) is not None)
        return all(max(self._states.secured(other), self._waiting(other)) >= state.version for other in held)

    def _waiting(self, number: int) -> int:
        """Return the version of a stage's state that has arrived completely and is not adopted yet, or -1."""
        state = self._arrived.get(number)
        return state.version if state and state.is_complete else -1

    def restore(self, state: ArrivedState) -> bool:
        """Adopt another worker's state of a stage; return False if it is not newer than the state here."""
        number = state.cell.stage
        if self._states.version(number) >= state.version:
            return False
        self._states.restore(number, self._plan.current.stages, state.layers)
        self._log.learn_generation(state.version, state.generation)
        return True


@dataclass(frozen=True, slots=True)
class Repeated:
    """A committed step of a cell that this worker repeats. lacks: addresses of input frames that are missing."""

    cell: Cell
    step: int
    lacks: Sequence[Address]


@dataclass(slots=True)
class Question:
    """A request to other workers for missing frames. answers: by worker and link, first logged steps of its cells."""

    step: int
    epoch: int
    answers: dict[tuple[WorkerId, FrameKind], dict[Cell, int]] = field(default_factory=dict)


class RepeatedSteps:
    """Repetition of committed steps: requests for missing frames, answers to them, and reports of `LeftBehind`."""

    def __init__(self, shared: CommitContext, replicator: Replicator) -> None:
        self._plan, self._outbox, self._states, self._replicator = shared.plan, shared.outbox, shared.states, replicator
        self._log, self._coordinator = shared.log, shared.coordinator
        self._questions: dict[Cell, Question] = {}
        self._asked: dict[Cell, int] = {}  # by cell, the newest committed step that its owner repeats

    def is_repeated(self, address: Address) -> bool:
        """Return whether a frame belongs to a committed step, which only the cell's owner may repeat."""
        return address.step <= max(self._log.newest, self._asked.get(address.cell, -1))

    def look(self, repeated: Iterable[Repeated], since: Mapping[Cell, int]) -> None:
        """Ask all other workers once per epoch, and again after `ask_again`, for frames that repeated steps lack.
        Report LeftBehind for cells whose step is older than the newest committed one or can never be completed. since:
        for each cell of this worker, the first step in the message log.
        """
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
        """Let `look` ask all questions again, after a broken link that may have lost them or their answers."""
        self._questions.clear()

    def answer(self, worker: WorkerId, cell: Cell, step: int, since: Mapping[Cell, int]) -> None:
        """Send the owner that repeats a step a newer state or final gradients, if here, logged frames and `since`."""
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
        """Return whether all answers are here, and the step needs a frame that no worker has or will make again."""
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
