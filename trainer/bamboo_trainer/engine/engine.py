"""The engine of a worker: it obeys plans, runs its stages, keeps replicas in step, and continues after losses.

One thread drives an engine. `handle(event)` processes an event (a frame, a broken link), `obey(plan)` a plan; `turn()`
does at most one piece of work and returns whether it did any. The engine never blocks on a peer, raises no error when
one is lost, and reads only injected clocks: the protocol simulator drives the same class.
"""

import gc
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bamboo_core.checkpoint.layout import CheckpointId
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
from bamboo_core.histogram import STEP_SECONDS, Histogram
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.planning.shares import kept_share
from bamboo_core.planning.splits.speeds import StageTimes
from bamboo_trainer.checkpoint.layer_file import RestoreError
from bamboo_trainer.engine.components import Components
from bamboo_trainer.engine.layer_copies import LayerCopies, LayerExchange, is_exchanged
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.frames import Frame, RefusedFrame, read
from bamboo_trainer.memory.gpus import release_cached
from bamboo_trainer.memory.host_copies import Copied
from bamboo_trainer.routing import Received
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import first_states
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AwaitedLayers:
    """A plan that comes into force once this worker awaits no more layers from other workers.

    when: the plan's arrival. begun: when building the stages began. Both in seconds of the clock. stages: the stages
    built, by number. owned: numbers of the stages that run here. kept: layers whose copies may stay in memory.
    """

    plan: Plan
    when: float
    begun: float
    stages: Mapping[int, Stage]
    owned: frozenset[int]
    kept: frozenset[int]


class Engine:
    """The engine of one worker. timer: times of its stages. copies: layers' states in host memory."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self.timer = StageTimer(ports.work_clock)
        self.components: Components | None = None  # None while no plan is in force
        self._received: deque[Received] = deque()  # frames to take in, including those of this worker to itself
        self._early: list[Received] = []  # frames that wait for a plan on its way
        self.copies = LayerCopies(ports.worker, ports.files, ports.coordinator, ports.clock, ports.host_memory)
        self._exchange = LayerExchange(ports.worker, ports.transport, self.copies)
        self._beginning: AwaitedLayers | None = None  # while layers for it are awaited

    # events

    def handle(self, event: Event | Copied) -> None:
        """Process an event of the transport, or the end of copying tensors to host memory."""
        match event:
            case Arrived(sender, frame) if is_exchanged(frame.address):
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
        """Put a plan in force: now, at its boundary, or once its layers are here. Ignore an outdated plan and, while
        layers are awaited, a plan of the same origin that gives this worker cells. arrived: clock seconds; None: now.
        """
        when = self._ports.clock() if arrived is None else arrived
        newest, before = self.newest_plan, self.origin
        if plan.origin < before:
            return
        if not (self._beginning and plan.origin == before and plan.owned_by(self._ports.worker)):
            self.copies.obeyed(plan)
        if newest is None or plan.origin > before:
            self.copies.goes_back(plan)
            self.forget()  # before the new states are built: memory may not suffice for both
            self._begin(plan, when)
        elif self._beginning and plan.epoch > newest.epoch and not plan.owned_by(self._ports.worker):
            self._exchange.stop()  # the others have begun, and send the states to replicate
            self._begin(plan, when)
        elif self.components and (now := self.components.plan.offer(plan)):
            self.components.on_plan(now, self.components.plan.current, when)
        self._take_in()

    def forget(self) -> None:
        """Drop all stages and the components that use them, to free memory for new states. Held copies stay."""
        had = bool(self.components or self._beginning)  # holding them here would keep them alive
        self.components = self._beginning = None
        self._exchange.stop()
        self.copies.forget_states()
        if had:
            gc.collect()  # its parts refer to each other
            release_cached()

    def _begin(self, plan: Plan, when: float) -> None:
        """Build the stages that this worker begins with; ask workers in `plan.sources` for layers that are not here."""
        begun, worker = self._ports.clock(), self._ports.worker
        owned, stages = frozenset(cell.stage for cell in plan.owned_by(worker)), dict[int, Stage]()
        for index in first_states(plan, worker):
            stages[index] = self._ports.builder.stage(index, plan.stages, begins=plan.restore is None)
            stages[index].values.park(self._ports.on_host and index not in owned)
        here = self.copies.of(plan.restore) if plan.restore else {}
        kept = frozenset(kept_share(plan, worker) | here.keys())
        self._beginning = AwaitedLayers(plan, when, begun, stages, owned, kept)
        self._connect(plan)
        if plan.moved:
            assert plan.restore is not None
            self.copies.begins_with(plan.restore)
        if plan.sources:
            layers = {layer for stage in stages.values() for layer in stage.values.layers_needed()}
            self._exchange.gather(plan, sorted(layers))
        self._begin_if_gathered()

    def _connect(self, plan: Plan) -> None:
        workers = {p.worker: (p.host, p.port) for p in plan.workers if p.worker != self._ports.worker}
        self._ports.transport.peers(workers)

    def _restore(self, values: StageValues, plan: Plan, kept: Collection[int]) -> bool:
        """Set a stage's values to the state that the plan names, and return True. If that state cannot be read, drop
        all states, send the coordinator RestoreFailed, and return False. kept: see `AwaitedLayers`.
        """
        assert plan.restore is not None
        if plan.moved:
            values.restore(self.copies.of(plan.restore))
            return True
        try:
            self.copies.restore(values, plan.restore, kept)
        except RestoreError as error:
            logger.warning("the checkpoint of step %d is not read: %s", error.checkpoint.step, error)
            self.forget()
            text = str(error)[:MOST_TEXT]
            self._ports.coordinator.tell(
                RestoreFailed(origin=plan.origin, checkpoint=error.checkpoint, message=text, damaged=error.damaged)
            )
            return False
        return True

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
        if plan.moved:
            self.copies.report()  # their former holder may be lost before all have begun
        for index, stage in beginning.stages.items() if plan.restore else ():
            if not self._restore(stage.values, plan, beginning.kept):
                return
            stage.values.park(False)  # restored tensors may be elsewhere than parked ones
            stage.values.park(self._ports.on_host and index not in beginning.owned)
        if plan.restore and not plan.moved:
            self.copies.keep_only(plan.restore, beginning.kept)
        self._beginning = None
        self.timer.begin(plan.stages)
        components = Components(
            self._ports, plan, self.timer, self._received, self._early, self.copies, beginning.stages
        )
        components.on_plan(plan, None, beginning.when, beginning.begun)
        self.components = components
        self.copies.report()  # layers read are kept as well

    def drop_copies(self, checkpoints: Sequence[CheckpointId]) -> None:
        self.copies.drop(checkpoints)

    def take_checkpoint(self, wanted: TakeCheckpoint) -> None:
        """As the root, begin the requested checkpoint with a later commit (see `Committer.take_checkpoint`)."""
        if self.components:
            self.components.committer.take_checkpoint(wanted)

    def hold(self, cut: CheckpointId) -> None:
        """Stop training at the state `cut`, to split the layers anew, and copy it, unless a later step is committed."""
        if self.components:
            self.components.hold(cut)
        self._take_in()

    def keep_last_state(self, wanted: KeepLastState) -> None:
        """Start to copy the state after the last step for a checkpoint; report CheckpointFailed if it is not here."""
        if not self.components or not self.components.keep_last(wanted):
            text = f"{self._ports.worker} does not hold the last state of its stages any more"
            self._ports.coordinator.tell(CheckpointFailed(checkpoint=wanted.checkpoint, message=text))

    def turn(self) -> bool:
        """Do the most urgent piece of work; return False if there is none."""
        if self.components is None:
            return False
        busy = self.components.turn()
        self._take_in()
        return busy

    def _take_in(self) -> None:
        """Process the waiting frames one by one, once a plan is in force. Only this method does so, and never within
        other work. Keep a frame of a newer origin until its plan comes. Drop a frame of an older origin, or one that
        `PlanState.accepts` refuses. Log and drop a malformed frame. A frame may arrive more than once.
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

    # queries

    def report(self) -> None:
        """Send the coordinator everything that it must know: it may have restarted, or messages may be lost."""
        if self.components is None:
            self._ports.coordinator.tell(Report(committed=-1, held={}))  # the coordinator waits for every answer
        else:
            self.components.report()
        self.copies.report()

    @property
    def reported_plan(self) -> Plan | None:
        """The newest plan (`newest_plan`) as the coordinator sent it, not divided into device stages."""
        return self.newest_plan

    @property
    def newest_plan(self) -> Plan | None:
        """The newest plan that `obey` accepted, in force or not; None before the first or after a failed restore."""
        if self._beginning:
            return self._beginning.plan
        return self.components.plan.newest if self.components else None

    @property
    def origin(self) -> int:
        """The origin of the newest plan; 0 without one."""
        newest = self.newest_plan
        return newest.origin if newest else 0

    @property
    def backwards(self) -> int:
        """The number of backwards run here since the states' origin (`Plan.origin`), repetitions included."""
        return self.components.executor.backwards if self.components else 0

    @property
    def step(self) -> int:
        """The step after the newest committed one known here, at first `Plan.first_step`; 0 without a plan."""
        if self._beginning:
            return self._beginning.plan.first_step
        return self.components.step if self.components else 0

    @property
    def step_seconds(self) -> Histogram:
        """The seconds between commits of steps that this worker made as the root since the states' origin."""
        return self.components.committer.step_seconds if self.components else Histogram.of(STEP_SECONDS)

    def times_due(self, now: float) -> tuple[StageTimes, ...] | None:
        """Return the stages' latest times, if any, at most once a second; else None. Only one thread may call this."""
        return self.timer.due(now)

    def owned_times(self) -> list[tuple[int, StageTimes]]:
        """Return (stage, times) of each measured stage that runs or has run here. Any thread may call this."""
        return self.timer.owned()

    def compile_seconds(self) -> dict[int, float]:
        """Return the seconds that compiling each stage held here took, by stage number. Any thread may call this."""
        held = tuple(self.components.states.by_stage.items()) if self.components else ()
        return {index: state.stage.compile_seconds for index, state in held if state.stage}

    def waits_for(self) -> str:
        """Return what this worker waits for while it has no work, as text for the user."""
        if self._beginning:
            return f"layers from {', '.join(self._exchange.asked())}"
        return self.components.executor.waits_for() if self.components else "a part"
