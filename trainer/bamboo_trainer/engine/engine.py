"""The engine: obeys plans, runs what is ready, keeps replicas in step, and goes on when a neighbour is gone.

One thread owns all of it. `handle(event)` takes in what happened (a frame, a broken link), `obey` a plan, `turn()` does
at most one piece of work and says whether there was any. Nothing here blocks, reads a clock that was not injected, or
raises because of a peer: the protocol simulator drives the very same class.
"""

import gc
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bamboo_core.control.protocol import (
    MOST_TEXT,
    CheckpointFailed,
    KeepLastState,
    PeerDown,
    PeerUp,
    Report,
    RestoreFailed,
    TakeCheckpoint,
)
from bamboo_core.metrics.histogram import STEP_SECONDS, Histogram
from bamboo_core.planning.plan import CheckpointId, Plan, WorkerId
from bamboo_core.planning.shares import kept_share
from bamboo_core.planning.splits.stage_times import StageTimes
from bamboo_trainer.checkpoint.errors import RestoreError
from bamboo_trainer.engine.components import Components
from bamboo_trainer.engine.layer_copies import LayerCopies
from bamboo_trainer.engine.layer_exchange import KINDS, LayerExchange
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.frames.frame import Frame
from bamboo_trainer.frames.payloads import RefusedFrame, read
from bamboo_trainer.memory.host_copies import Copied
from bamboo_trainer.memory.placement import release_cached
from bamboo_trainer.routing.outbox import Received
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import first_states
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AwaitedLayers:
    """A plan whose states are made of layers that are on their way. when: it came. stages: not in their state yet.

    owned: those of them that are run here. kept: layers of which copies stay here, if the state is a checkpoint's.
    """

    plan: Plan
    when: float
    stages: Mapping[int, Stage]
    owned: frozenset[int]
    kept: frozenset[int]


class Engine:
    """One worker's part in the job. timer: of its work."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self.timer = StageTimer(ports.work_clock)
        self.components: Components | None = None  # until the first plan
        self._received: deque[Received] = deque()  # frames that are to be taken in, those of this worker to itself, too
        self._early: list[Received] = []  # of an origin that is not known yet
        self.copies = LayerCopies(ports.worker, ports.files, ports.coordinator, ports.clock, ports.host_memory)
        self._exchange = LayerExchange(ports.worker, ports.transport, self.copies)
        self._beginning: AwaitedLayers | None = None  # until all layers for it are here

    # what happened

    def handle(self, event: Event | Copied) -> None:
        """Take in what the transport tells, or that something is copied."""
        match event:
            case Arrived(sender, frame) if frame.address.kind in KINDS:
                self._on_layers(sender, frame)
            case Arrived(sender, frame):
                self._received.append((sender, frame))
            case Copied() if self.components:
                self.components.outbox.advance()
            case LinkDown(peer) if self.components:
                self.components.on_link_down(peer)
            case LinkDown(peer) if self._beginning and peer in self._beginning.plan.worker_ids():
                self._ports.coordinator.tell(PeerDown(peer=peer))
            case LinkUp(peer):
                self._ports.coordinator.tell(PeerUp(peer=peer))
                self._exchange.relinked(peer)
                if self.components:
                    self.components.on_link_up(peer)
        self._take_in()

    def obey(self, plan: Plan, arrived: float | None = None) -> None:
        """A plan came from the coordinator. arrived: when, if it had to wait for an instruction to end."""
        when = self._ports.clock() if arrived is None else arrived
        newest, before = self.newest_plan, self.origin
        if plan.origin < before:
            return
        if not (self._beginning and plan.origin == before and plan.owned_by(self._ports.worker)):
            self.copies.obeyed(plan)
        if newest is None or plan.origin > before:
            self.copies.goes_back(plan)
            self.forget()  # before the new states are made: there may not be memory for both
            if plan.sources:
                self._gather(plan, when)
            else:
                self._begin(plan, when)
        elif self._beginning and plan.epoch > newest.epoch and not plan.owned_by(self._ports.worker):
            self._beginning = None  # the others have begun: what it replicates comes from them
            self._begin(plan, when)
        elif self.components and (now := self.components.plan.offer(plan)):
            self.components.on_plan(now, self.components.plan.current, when)
        self._take_in()

    def forget(self) -> None:
        """All states and what belongs to them: others will begin, and may need the memory."""
        had = bool(self.components or self._beginning)  # holding them here would keep them alive
        self.components = self._beginning = None
        self._exchange.stop()
        self.copies.forget_states()
        if had:
            gc.collect()  # its parts refer to each other
            release_cached()

    def _begin(self, plan: Plan, when: float) -> None:
        """With the states that the plan names: those of a checkpoint in the store, or those before the first step."""
        begun, stages = self._ports.clock(), dict[int, Stage]()
        self.timer.begin(plan.stages)
        self._connect(plan)
        owned = {cell.stage for cell in plan.owned_by(self._ports.worker)}
        for index in first_states(plan, self._ports.worker):
            assert not plan.moved, f"stage {index} has none of the layers that were moved"
            stages[index] = self._ports.builder.stage(index, plan.stages, begins=plan.restore is None)
            share = kept_share(plan, self._ports.worker)
            if plan.restore and not self._restore(stages[index].values, plan, share):
                return
            stages[index].values.park(self._ports.on_host and index not in owned)
        self._begin_with(stages, plan, when, begun)
        self.copies.report()  # what has been read is kept as well

    def _begin_with(self, stages: Mapping[int, Stage], plan: Plan, when: float, begun: float) -> None:
        """stages: in the states that the plan names. begun: when they began to be made, seconds of the clock."""
        components = Components(self._ports, plan, self.timer, self._received, self.copies, stages)
        components.on_plan(plan, None, when, begun)
        self.components = components
        self._received.extend(self._early)
        self._early.clear()

    def _connect(self, plan: Plan) -> None:
        workers = {p.worker: (p.host, p.port) for p in plan.workers if p.worker != self._ports.worker}
        self._ports.transport.peers(workers)

    def _restore(self, values: StageValues, plan: Plan, share: Collection[int]) -> bool:
        """Take the state over that the plan names. share: layers to keep copies of. False if it cannot be read: then
        nothing is held here, and the coordinator knows.
        """
        assert plan.restore is not None
        try:
            self.copies.restore(values, plan.restore, share)
        except RestoreError as error:
            logger.warning("the checkpoint of step %d is not read: %s", error.checkpoint.step, error)
            self.forget()
            text = str(error)[:MOST_TEXT]
            self._ports.coordinator.tell(
                RestoreFailed(origin=plan.origin, checkpoint=error.checkpoint, message=text, damaged=error.damaged)
            )
            return False
        return True

    def _gather(self, plan: Plan, when: float) -> None:
        """The plan's states are made of layers that workers hold; those that are not here are asked for."""
        assert plan.restore is not None
        worker = self._ports.worker
        mine = {c.stage for c in (*plan.owned_by(worker), *plan.replicated_by(worker))}
        owned = {c.stage for c in plan.owned_by(worker)}
        stages = {}
        for index in sorted(mine):
            stages[index] = self._ports.builder.stage(index, plan.stages)
            stages[index].values.park(self._ports.on_host and index not in owned)
        if plan.moved:
            self.copies.begins_with(plan.restore)
        kept = kept_share(plan, worker) | self.copies.of(plan.restore).keys()
        self._beginning = AwaitedLayers(plan, when, stages, frozenset(owned), frozenset(kept))
        self._connect(plan)
        self._exchange.gather(
            plan, sorted({layer for stage in stages.values() for layer in stage.values.layers_needed()})
        )
        self._begin_if_gathered()

    def _on_layers(self, sender: WorkerId, frame: Frame) -> None:
        try:
            self._exchange.take(sender, read(frame))
        except RefusedFrame as error:
            logger.warning("refused a %s of %s: %s", frame.address.kind.name, sender, error)
        self._begin_if_gathered()

    def _begin_if_gathered(self) -> None:
        beginning = self._beginning
        if beginning is None or self._exchange.missing:
            return
        plan = beginning.plan
        assert plan.restore is not None
        if plan.moved:
            self.copies.report()  # whoever had them may be lost before all have begun
        for index, stage in beginning.stages.items():
            if plan.moved:
                stage.values.restore_layers(self.copies.of(plan.restore))
            elif not self._restore(stage.values, plan, beginning.kept):
                return
            stage.values.park(False)  # what has been restored may be elsewhere than what was parked
            stage.values.park(self._ports.on_host and index not in beginning.owned)
        if not plan.moved:
            self.copies.keep_only(plan.restore, beginning.kept)
        self._beginning = None
        self.timer.begin(plan.stages)
        self._begin_with(beginning.stages, plan, beginning.when, self._ports.clock())
        if not beginning.stages:
            self.copies.report()

    def drop_copies(self, checkpoints: Sequence[CheckpointId]) -> None:
        """The coordinator says that copies of these checkpoints are of no use any more."""
        self.copies.drop(checkpoints)

    def take_checkpoint(self, wanted: TakeCheckpoint) -> None:
        """The coordinator wishes that the next state is kept."""
        if self.components:
            self.components.committer.take_checkpoint(wanted)

    def keep_last_state(self, wanted: KeepLastState) -> None:
        """The coordinator asks for the state after the last step, which is still here."""
        if not self.components or not self.components.keep_last(wanted):
            text = f"{self._ports.worker} does not hold the last state of its stages any more"
            self._ports.coordinator.tell(CheckpointFailed(checkpoint=wanted.checkpoint, message=text))

    def turn(self) -> bool:
        """Do the most urgent piece of work; False if there is none."""
        if self.components is None:
            return False
        busy = self.components.turn()
        self._take_in()
        return busy

    def _take_in(self) -> None:
        """Frames are taken in one after the other, and nowhere else, so nothing is interrupted by one.

        A frame may arrive more than once. What is not as its kind must be is told, and dropped. What belongs to states
        that begin with a plan on its way waits for that, and what belongs to states that are given up is dropped.
        """
        while self.components and self._received:
            sender, frame = self._received.popleft()
            plan = self.components.plan
            if frame.origin > plan.current.origin:
                self._early.append((sender, frame))
            if frame.origin != plan.current.origin or not plan.accepts(sender, frame.epoch):
                continue
            try:
                self.components.on_frame(sender, read(frame))
            except RefusedFrame as error:
                logger.warning("refused a %s of %s: %s", frame.address.kind.name, sender, error)

    # what others ask

    def report(self) -> None:
        """Say everything that the coordinator has to know: it may have been restarted, or messages may be lost."""
        if self.components is None:
            self._ports.coordinator.tell(Report(committed=-1, held={}))  # who asks waits for every answer
        else:
            self.components.report()
        self.copies.report()

    def trained(self, index: int) -> tuple[StageValues, ...]:
        """The values of the stage in its final state, if it is here; with several devices, those of each part."""
        stage = self.components.states.stage(index) if self.components else None
        return (
            (stage.values,)
            if self.components and stage and stage.values.version >= self.components.executor.steps
            else ()
        )

    @property
    def plan_told(self) -> Plan | None:
        """The newest plan, as the coordinator says it."""
        return self.newest_plan

    @property
    def newest_plan(self) -> Plan | None:
        """The newest plan that this worker knows, in force or not."""
        if self._beginning:
            return self._beginning.plan
        return self.components.plan.newest if self.components else None

    @property
    def origin(self) -> int:
        """The origin of that plan; 0 before the first one."""
        newest = self.newest_plan
        return newest.origin if newest else 0

    @property
    def backwards(self) -> int:
        """Microbatches that were run back here, since this worker took part."""
        return self.components.executor.backwards if self.components else 0

    @property
    def step(self) -> int:
        """So many are committed, as far as this worker knows; the next one is in progress."""
        if self._beginning:
            return self._beginning.plan.first_step
        return self.components.step if self.components else 0

    @property
    def step_seconds(self) -> Histogram:
        """The seconds of the steps that this worker has committed as the root."""
        return self.components.committer.step_seconds if self.components else Histogram(STEP_SECONDS)

    def held(self) -> dict[int, bool]:
        """For each stage that is held here: is it run here? Any thread may ask."""
        held = tuple(self.components.states.by_stage.items()) if self.components else ()
        return {index: state.owned for index, state in held}

    def times_due(self, now: float) -> tuple[StageTimes, ...] | None:
        """What stages take here, if it is to be told now; from any one thread."""
        return self.timer.due(now)

    def owned_times(self) -> list[tuple[int, StageTimes]]:
        """By stage, of those that are run here and were measured; any thread may ask."""
        return self.timer.owned()

    def compile_seconds(self) -> dict[int, float]:
        """What compiling the layers of each stage took that is held here. Any thread may ask."""
        held = tuple(self.components.states.by_stage.items()) if self.components else ()
        return {index: state.stage.compile_seconds for index, state in held if state.stage}

    def waits_for(self) -> str:
        """Why there is no work right now, for a person."""
        if self._beginning:
            return f"layers from {', '.join(self._exchange.asked())}"
        return self.components.executor.waits_for() if self.components else "a part"
