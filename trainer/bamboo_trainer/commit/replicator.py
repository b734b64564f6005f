"""Replicas: what a cell's owner sends to them, what they answer, and when the owner waits for them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from bamboo_core.control.protocol import ReplicaSynced
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.commit.replica_progress import Owed, ReplicaProgress
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import Announce, Commits, RefusedFrame, ReplicaStart
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.state.layer_state import LayerState
from bamboo_trainer.task import Parts


@dataclass(frozen=True, slots=True)
class ArrivedState:
    """Another worker's state of a cell's stage, of which layers arrive. wanted: how many it has. generation: of the
    layout at its version.
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
    """Sends states and final gradients to replicas, and takes them in as a replica.

    progress: of each replica of the cells that this worker owns. `send_next`, not `finalize`, sends final gradients:
    the step is reported first, because all workers wait for its commit, and its gradients are copied afterwards.
    """

    def __init__(
        self,
        plan: PlanState,
        outbox: Outbox,
        states: StageStates,
        committer: Committer,
        coordinator: Coordinator,
    ) -> None:
        self._plan, self._outbox, self._states = plan, outbox, states
        self._committer, self._coordinator = committer, coordinator
        self.progress: dict[tuple[Cell, WorkerId], ReplicaProgress] = {}
        self._unsent: dict[tuple[Cell, WorkerId, int], None] = {}  # final gradients, by step; in order
        self._arrived: dict[int, ArrivedState] = {}  # for stages here, by stage, not taken over yet

    # as an owner

    def take_roles(self, old: Plan | None) -> None:
        """Keep records of the replicas in the plan in force. old: the plan before."""
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
        """Take in a step's final gradient: for the state here, and later for the replicas.

        It comes from a cell of this worker or, if none of its cells runs this step, from the owner it replicates.
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
        """Send one replica one step's final gradients, if they are still here and it is still a replica."""
        cell, replica, step = key = next(iter(self._unsent))
        del self._unsent[key]
        if (cell, replica) in self.progress and self._states.has_final(cell.stage, step):
            self.send_final(replica, cell, step)

    def hand_over(self, cell: Cell, worker: WorkerId, step: int) -> Frame:
        """Return the step's final gradients for a replica that takes over the cell. First send what it was still to
        get: it waits for that now, and `send_next` serves only replicas.
        """
        for key in [one for one in self._unsent if one[:2] == (cell, worker)]:
            del self._unsent[key]
            if self._states.has_final(cell.stage, key[2]):
                self.send_final(worker, cell, key[2])
        return self._outbox.frame(*self._final(cell, step))

    def send_final(self, worker: WorkerId, cell: Cell, step: int) -> None:
        """Send final gradients held here to a worker with a part in that cell, once they are copied."""
        self._outbox.post(worker, *self._final(cell, step))

    def _final(self, cell: Cell, step: int) -> tuple[Address, Parts, Commits]:
        """Return the gradients with the commits that they follow from, which a replica that is being filled may have
        missed: no worker waits for it.
        """
        final = self._states.final(cell.stage, step)
        assert final is not None
        return Address(FrameKind.SYNC, *cell, step), (final,), self._committer.log.latest()

    def announced(self, cell: Cell, replica: WorkerId, epoch: int, announce: Announce) -> None:
        """Take in a replica's announcement of its version. epoch: of the plan that the replica obeys."""
        progress, held = self.progress[cell, replica], self._states.of(cell)
        if epoch < progress.epoch:
            return  # it announces again when it obeys that plan
        if held is None:
            progress.secured = announce.secured
            return
        same = not (announce.version == 0 and held.version == 0) or announce.digest == held.digest()
        owed = progress.announced(announce.version, announce.secured, held.version, same)
        self._send_owed(cell, replica, owed)
        progress.caught_up(held.version)
        if not progress.level and self._come_level(cell, replica):
            self._coordinator.tell(ReplicaSynced(cell=cell, replica=replica))

    def _come_level(self, cell: Cell, replica: WorkerId) -> bool:
        """Return whether a replica now holds all parts of its owner's stage, and mark it as level if so.

        From then on its parts move together. At different versions, none of them could repeat a step after a loss: what
        the parts had sent to each other is lost with their owner.
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
        """Send again what may have been lost on the link to that peer."""
        for (cell, replica), progress in self.progress.items():
            if replica == peer:
                self._send_owed(cell, replica, progress.relinked(self._states.version(cell.stage)))

    def skipped(self, stage: int) -> None:
        """Bring replicas up to an owner that took over a newer state, and so never has the gradients in between."""
        for (cell, replica), progress in self.progress.items():
            if cell.stage == stage:
                self._send_owed(cell, replica, progress.relinked(self._states.version(stage)))

    def _send_owed(self, cell: Cell, replica: WorkerId, owed: Owed) -> None:
        if self._states.of(cell) is None or owed is Owed.NOTHING:
            return
        if owed is Owed.STATE:
            self.send_state(cell, replica)
        for step in self._states.final_steps(cell.stage):
            self._unsent.pop((cell, replica, step), None)
            self.send_final(replica, cell, step)

    def send_state(self, cell: Cell, worker: WorkerId) -> None:
        held = self._states[cell.stage]
        states = held.layer_states(held.layers_needed(), shown=False)
        filling = ReplicaStart(
            layers=len(states),
            generation=self._committer.generation(held.version),
            commits=self._committer.log.latest(),
        )
        for layer, state in states.items():
            address = Address(FrameKind.LAYER, *cell, held.version, part=layer)
            payload = state.payload(filling=filling)
            self._outbox.send(worker, self._outbox.frame(address, state.tensors.values(), payload))

    def holds_back(self, cell: Cell, step: int, strict: bool) -> bool:
        """Return whether a replica keeps this step from being reported. strict: see `ReplicaProgress.holds_back`."""
        return any(p.holds_back(step, strict) for (c, _), p in self.progress.items() if c == cell)

    def synced(self) -> Iterator[tuple[Cell, WorkerId]]:
        """Return the replicas that have held all that their owner holds."""
        return (key for key, progress in self.progress.items() if progress.level)

    # as a replica

    def announce(self, stage: int) -> None:
        """Send the version of a stage to the owners of the cells that are replicated here."""
        held, version = self._states.here(stage), self._states.version(stage)
        digest = held.digest() if held is not None and version == 0 else ""
        for cell in self._plan.current.replicated_by(self._plan.worker):
            if cell.stage == stage:
                payload = Announce(version=version, secured=self._states.secured(stage), digest=digest)
                self._outbox.send(
                    self._plan.owner(cell), self._outbox.frame(Address(FrameKind.ANNOUNCE, *cell, 0), payload=payload)
                )

    def received(self, address: Address, final: Tensor) -> None:
        """Take in a stage's final gradient from its owner. Raises RefusedFrame."""
        number, held = address.stage, self._states.of(address.cell)
        if held and final.numel() != held.final.size:
            raise RefusedFrame(f"a gradient of {final.numel()} elements, expected {held.final.size}")
        self.finalize(number, address.step, final)
        self.announce(number)

    def layer_arrived(self, frame: Frame) -> None:
        """Keep a layer of another worker's state of a stage for `next_state`: of the newest version that comes."""
        address, filling = frame.address, frame.payload.filling
        state = self._arrived.get(address.stage)
        if state is None or state.version < address.step:
            state = ArrivedState(address.cell, address.step, filling.layers, filling.generation)
            self._arrived[address.stage] = state
        if state.version == address.step:
            state.layers[address.part] = LayerState.of(frame)

    def next_state(self) -> ArrivedState | None:
        """Return a state that may be taken over now, or None. A replica with parts on several devices waits until the
        other parts can reach the same version: if their owner is lost at different versions, none can be repeated.
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
        """Return the version of a state that has arrived, or -1."""
        state = self._arrived.get(number)
        return state.version if state and state.is_complete else -1

    def restore(self, state: ArrivedState) -> bool:
        """Take over another worker's newer state of a stage; False if it is not newer. Raises RefusedFrame."""
        number = state.cell.stage
        if self._states.version(number) >= state.version:
            return False
        try:
            self._states.restore(number, self._plan.current.stages, state.layers)
        except ValueError as error:
            raise RefusedFrame(str(error)) from error
        self._committer.log.learn_generation(state.version, state.generation)
        return True
