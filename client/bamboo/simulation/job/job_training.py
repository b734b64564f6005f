"""The workers of a simulated job in virtual time: steps, plans, states and checkpoints.

As with real workers, a plan takes effect at once or with a commit, the workers that take over a lost owner's stages
complete the step, and a replica holds a state only once it is copied.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from bamboo.simulation.job.held_states import HeldStates
from bamboo.simulation.job.job_record import JobRecord
from bamboo.simulation.job.virtual_clock import Timer, VirtualClock
from bamboo.simulation.job.zone_traffic import Transfer, crossing, step_traffic
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.control import protocol
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.plan import ROOT, Cell, Plan, WorkerId
from bamboo_core.planning.profile import ModelProfile
from bamboo_core.planning.shares import kept_share, share
from bamboo_core.planning.splits.resplit_plans import needed
from bamboo_core.planning.splits.speeds import StageTimes
from bamboo_core.planning.steps.step_times import StepModel

LEARNING_STEPS: Final = 16  # first steps on a new grid, reported to the coordinator one by one with the stages' times
MEASURED_MICROBATCHES: Final = 64
FIRST_TIMED: Final = 10  # microbatches of the first step on a grid after which owners report their stages' times
COPY_RATE: Final = 5e9  # bytes per second from a device to pageable host memory, for the copies of a cut
Tell = Callable[[WorkerId, protocol.Message], None]


class SimulatedTraining:
    """The training of a simulated job, step by step.

    tell: sends a worker's message to the coordinator. most: returns how many steps may run before the next report.
    """

    def __init__(
        self,
        clock: VirtualClock,
        model: StepModel,
        profile: ModelProfile,
        spec: JobSpec,
        record: JobRecord,
        *,
        tell: Tell,
        most: Callable[[], int],
    ) -> None:
        self._clock, self._model, self._spec, self._record = clock, model, spec, record
        self._profile = profile
        self._tell, self._most = tell, most
        self._held = HeldStates(self._profile)
        self.step, self._furthest = 0, 0
        self.plan: Plan | None = None  # the newest plan that has arrived and does not wait for its boundary
        self._pending: Plan | None = None
        self._begun: Plan | None = None  # the plan with which the current step began; None: no step is in progress
        self._since = 0.0  # when it began
        self._seconds = 0.0  # its undisturbed duration
        self._changes: list[tuple[float, Plan]] = []  # (seconds since it began, plan) of each new plan
        self._timer: Timer | None = None
        self._generation = 0
        self._gone: dict[WorkerId, float] = {}  # lost workers, and when
        self._left: dict[WorkerId, float] = {}  # workers lost in the current step, or whose cells moved, and when
        self._idle_since: float | None = 0.0
        self._wish: protocol.TakeCheckpoint | None = None
        self._carried: tuple[int, CheckpointId] | None = None
        self._kept: list[CheckpointId] = []
        self._cut_state: CheckpointId | None = None  # the newest cut
        self._copies: dict[WorkerId, frozenset[int]] = {}
        self._checkpoints = self._backwards = 0
        self._timed: tuple[object, int] = None, 0  # the grid whose steps are reported one by one, and its first step
        self._counted = (-1, -1), 0.0  # (epoch, generation), and its traffic per step

    # plans

    def plan_arrived(self, plan: Plan) -> None:
        """Adopt a plan that reached its workers; a boundary plan waits for the step's end. Ignore outdated plans."""
        newest = self._pending or self.plan
        if newest is not None and plan.epoch <= newest.epoch:
            return
        if self.plan is None or plan.origin != self.plan.origin:
            self._begin_anew(plan)
        elif plan.boundary and self._begun is not None:
            self._pending = plan
        else:
            self._switch(plan)

    def _begin_anew(self, plan: Plan) -> None:
        """Stop training, load the plan's initial state into all workers, and resume once all owners have it."""
        self._stop()
        self.plan, self._pending, self._carried, self._wish = plan, None, None, None
        if not plan.moved or self._cut_state != plan.restore:
            self._cut_state, self._copies = None, {}
        times, transfers = self._held.beginning(plan, self._copies)
        self._send(plan, transfers)
        self._held = HeldStates(self._profile)
        owners = [plan.at(cell).owner for cell in plan.cells()]
        for worker, seconds in times.items():
            self._clock.after(seconds, partial(self._applied, worker, plan))
        self._clock.after(max(times[worker] for worker in owners), partial(self._started, plan))

    def _started(self, plan: Plan) -> None:
        """Begin training from the plan's initial state, which all owners have now. Ignore a plan of outdated origin."""
        current = self.plan
        if current is None or current.origin != plan.origin:
            return
        self._held.begin(current)
        self.step, self._generation = plan.first_step, current.target.generation
        if plan.restore is not None and not plan.moved:
            for worker in sorted(plan.worker_ids() - self._gone.keys()):
                held = protocol.CopiesHeld(checkpoint=plan.restore, layers=tuple(sorted(kept_share(plan, worker))))
                self._tell(worker, held)
        self._say_synced(current)
        if not self._record.begun:
            self._record.begun = self._clock.now
        self._waited()
        self._begin()

    def end(self) -> None:
        """Record the standstill of the grid at the end of the run, if there is one."""
        if self._begun is not None and self._timer is None and self._idle_since is None:
            self._idle_since = min([self._clock.now, *self._left.values()])  # the remaining workers get no plan
        self._waited()

    def _waited(self) -> None:
        """Record the end of a standstill of the grid, if there is one."""
        if self._idle_since is not None:
            self._record.stopped.append((self._idle_since, self._clock.now, self._clock.now - self._idle_since))
            self._idle_since = None

    def _applied(self, worker: WorkerId, plan: Plan) -> None:
        if worker not in self._gone:
            if plan.moved and plan.restore == self._cut_state:
                self._copies[worker] = self._copies.get(worker, frozenset()) | needed(plan, worker)
            self._tell(worker, protocol.PlanApplied(epoch=plan.epoch))

    def _say_synced(self, plan: Plan) -> None:
        for cell in plan.cells():
            for replica in plan.at(cell).replicas:
                if self._held.has(replica, cell.stage) and plan.at(cell).owner not in self._gone:
                    self._tell(plan.at(cell).owner, protocol.ReplicaSynced(cell=cell, replica=replica))

    def _switch(self, plan: Plan) -> None:
        """Follow a plan at once. If a step is in progress, new owners of cells repeat the cells' work in it."""
        before, now = self.plan, self._clock.now
        assert before is not None
        self._pending = None
        self._follow(plan)
        if self._begun is None:
            return
        for cell in self._cells(self._begun):
            owner = self._begun.at(cell).owner
            if plan.at(cell).owner != owner:
                self._left.setdefault(owner, self._gone.get(owner, now))
        moved = any(plan.at(cell).owner != before.at(cell).owner for cell in self._cells(plan))
        if any(plan.at(cell).owner in self._gone for cell in self._cells(plan)) or not (moved or self._timer is None):
            return
        self._complete_elsewhere(plan, before)

    def _complete_elsewhere(self, plan: Plan, before: Plan) -> None:
        assert self._begun is not None
        now, since = self._clock.now, self._since
        layout = next(one for one in self._begun.layouts if one.generation == self._generation)
        gone = {w: max(0.0, at - since) for w, at in self._left.items() if w in self._gone}
        self._changes.append((now - since, plan))
        seconds, repeating = self._model.disturbed(self._begun, self._changes, layout, gone)
        if self._timer is not None:
            self._timer.cancel()
        self._record.pauses.append((now, max(0.0, seconds - self._seconds)))
        over = min(now + repeating, since + seconds)
        self._clock.at(over, partial(self._say_taken_over, plan, before, over - now))  # before the step's commit
        self._timer = self._clock.at(since + seconds, partial(self._committed, 1))
        self._watch()

    def _watch(self) -> None:
        """Schedule a heartbeat that reports finished microbatches, long before the progress deadline."""
        self._clock.after(self._spec.progress_deadline_seconds / 4, partial(self._say_working, self._since))

    def _say_working(self, since: float) -> None:
        plan = self._current_plan
        alive = [worker for cell in self._cells(plan) if (worker := plan.at(cell).owner) not in self._gone]
        if self._begun is None or self._timer is None or self._since != since or not alive:
            return
        self._backwards += 1
        self._tell(alive[0], protocol.Heartbeat(step=self.step, backwards=self._backwards))
        self._watch()

    def _follow(self, plan: Plan) -> None:
        """Apply a plan: change roles, and begin to copy states to their new holders."""
        self.plan = plan
        moving = self._held.follow(plan, self._clock.now)
        self._send(plan, [state.transfer for state in moving])
        for at, worker, stage, _ in moving:
            self._clock.at(at, partial(self._state_arrived, worker, stage, at))
        for worker in sorted(plan.worker_ids()):
            self._applied(worker, plan)
        self._say_synced(plan)

    def _state_arrived(self, worker: WorkerId, stage: int, at: float) -> None:
        plan = self.plan
        if plan is None or not self._held.arrived(worker, stage, at):
            return
        if self._cut_state not in (None, plan.restore):  # the state is that of the cut
            self._copy(plan, worker, [stage])
        for cell in plan.cells():
            roles, ours = plan.at(cell), cell.stage == stage
            if ours and worker in roles.replicas and roles.owner not in self._gone:
                self._tell(roles.owner, protocol.ReplicaSynced(cell=cell, replica=worker))

    def _say_taken_over(self, plan: Plan, before: Plan, seconds: float) -> None:
        for cell in plan.cells():
            if cell.pipeline >= len(before.pipelines) or plan.at(cell).owner == before.at(cell).owner:
                continue
            if plan.at(cell).owner not in self._gone:
                taken = protocol.TakenOver(
                    epoch=plan.epoch,
                    cell=cell,
                    step=self.step,
                    reform_ms=0.0,
                    recompute_ms=1000 * seconds,
                    forwards=0,
                    backwards=0,
                )
                self._tell(plan.at(cell).owner, taken)

    # steps

    @property
    def _current_plan(self) -> Plan:
        """The plan in force, which exists whenever a step runs."""
        assert self.plan is not None
        return self.plan

    def _cells(self, plan: Plan) -> list[Cell]:
        """Return the cells that run in the layout in force."""
        pipelines = next((one.pipelines for one in plan.layouts if one.generation == self._generation), 0)
        return [cell for cell in plan.cells() if cell.pipeline < pipelines]

    def _begin(self) -> None:
        plan = self._current_plan
        if any(plan.at(cell).owner in self._gone for cell in self._cells(plan)):
            self._begun, self._since, self._timer, self._left, self._changes = plan, self._clock.now, None, {}, []
            return
        layout = next(one for one in plan.layouts if one.generation == self._generation)
        self._seconds = self._model.seconds(plan, layout)
        self._begun, self._since, self._left, self._changes = plan, self._clock.now, {}, []
        until = max(0.0, self._clock.next - self._clock.now)
        alone = self._wish is not None or self._pending is not None or self._is_new(plan) or layout is not plan.target
        steps = 1 if alone else int(min(until / self._seconds, self._most()))
        steps = max(1, min(steps, self._spec.training.steps - self.step))
        self._timer = self._clock.after(steps * self._seconds, partial(self._committed, steps))
        if self._seconds > self._spec.progress_deadline_seconds / 4:
            self._watch()
        fewest = min(map(len, layout.split))
        if self._is_new(plan) and self.step == self._timed[1] and fewest > FIRST_TIMED:
            self._clock.after(self._seconds * FIRST_TIMED / fewest, partial(self._say_first_times, plan, self._since))

    def _say_first_times(self, plan: Plan, since: float) -> None:
        """Report the stages' times in the step that began at `since`, unless it has ended or an owner has left."""
        if self._begun is plan and self._since == since and not self._left:
            self._say_times(plan)

    def _committed(self, steps: int) -> None:
        """Commit the `steps` steps that end now, report only the last one, then begin the next step, cut or finish."""
        plan, now = self._current_plan, self._clock.now
        self._record.sent(self._since, now, self._step_traffic(plan) * steps)
        new = self.step + steps - max(self._furthest, self.step)
        self._record.stepped(self._since, now, steps, new)
        self.step += steps
        self._furthest = max(self._furthest, self.step)
        checkpoint, hold = self._carry(plan)
        ran, root, took = self._generation, plan.at(ROOT).owner, (now - self._since) / steps
        self._begun, self._timer = None, None
        if self._pending is not None:
            self._cross_boundary(plan, self._pending)
        self._generation = self._current_plan.target.generation  # also if a takeover came in a step before the boundary
        if self._is_new(plan):
            self._say_times(plan)
        committed = protocol.StepCommitted(
            step=self.step - 1,
            generation=ran,
            loss=1.0,
            gradient_norm=1.0,
            microbatches=self._spec.training.microbatches,
            seconds=took,
            checkpoint=checkpoint,
        )
        self._tell(root, committed)
        if self.step >= self._spec.training.steps:
            plan = self._current_plan
            for cell in self._cells(plan):
                self._tell(plan.at(cell).owner, protocol.CellFinished(cell=cell, digest="0" * 16))
        elif hold and checkpoint is not None:
            self._cut(plan, checkpoint[1])
        else:
            self._begin()

    def _is_new(self, plan: Plan) -> bool:
        """Return whether an elastic job's grid is in its first LEARNING_STEPS steps, and record when a grid is new."""
        if not self._spec.elastic:
            return False
        ran = plan.stages, plan.target.pipelines, plan.target.schedule
        if self._timed[0] != ran:
            self._timed = ran, self.step
        return self.step < self._timed[1] + LEARNING_STEPS

    def _say_times(self, plan: Plan) -> None:
        """Report the owners' measured times of their stages."""
        stages = self._model.stages(plan.stages)
        for cell in self._cells(plan):
            times = StageTimes(
                layers=plan.stages[cell.stage],
                forward=stages.forward[cell.stage],
                backward=stages.backward[cell.stage],
                each=tuple(layer.forward for layer in self._profile.layers[slice(*plan.stages[cell.stage])]),
                microbatches=MEASURED_MICROBATCHES,
            )
            self._answer(plan.at(cell).owner, protocol.Heartbeat(step=self.step, times=(times,)))

    def _step_traffic(self, plan: Plan) -> float:
        """Return the bytes of one step that cross zones, cached until the plan or the layout in force changes."""
        key = plan.epoch, self._generation
        if self._counted[0] != key:
            layout = next(one for one in plan.layouts if one.generation == self._generation)
            self._counted = key, step_traffic(plan, layout, self._profile)
        return self._counted[1]

    def _send(self, plan: Plan, transfers: list[Transfer]) -> None:
        """Record the bytes of these transfers that cross zones, as sent now. plan: gives the workers' zones."""
        zones = {peer.worker: peer.zone for peer in plan.workers}
        self._record.sent(self._clock.now, self._clock.now, crossing(transfers, zones))

    def _cross_boundary(self, before: Plan, plan: Plan) -> None:
        self._pending = None
        self._follow(plan)
        self._say_taken_over(plan, before, 0.0)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._begun = None
        if self._idle_since is None:
            self._idle_since = min([self._clock.now, *self._left.values()])

    def lost(self, worker: WorkerId) -> None:
        """Drop a lost worker's states; stop the step if it owned a cell. The coordinator learns of the loss later."""
        now = self._clock.now
        self._gone[worker] = now
        self._held.lose(worker)
        plans = [plan for plan in (self._begun, self.plan) if plan is not None]
        owned = any(plan.at(cell).owner == worker for plan in plans for cell in self._cells(plan))
        if self._begun is None or not owned:
            return
        self._left.setdefault(worker, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # checkpoints and cuts

    def wished(self, worker: WorkerId, wish: protocol.TakeCheckpoint) -> None:
        if self._carried is not None and self._carried[0] == wish.number:
            self._tell(worker, protocol.CheckpointBegun(number=wish.number, checkpoint=self._carried[1]))
        else:
            self._wish = wish if wish.at <= self._spec.training.steps else None

    def hold(self, cut: CheckpointId) -> None:
        """Abandon the step in progress and cut at the state before it. Ignore a repeated or outdated cut."""
        if self.step == cut.step and self._cut_state != cut:
            self._stop()
            self._cut(self._current_plan, cut)

    def _carry(self, plan: Plan) -> tuple[tuple[int, CheckpointId] | None, bool]:
        """Begin a checkpoint if it is due. Return (request number, checkpoint) or None, and whether it is a cut."""
        wish = self._wish
        if wish is None or self.step < wish.at:
            return None, False
        self._wish, self._checkpoints = None, self._checkpoints + 1
        checkpoint = CheckpointId(step=self.step, id=f"{self._checkpoints:x}")
        self._carried = wish.number, checkpoint
        if not wish.hold:
            self._clock.after(0.0, partial(self._write, plan, wish.writers, checkpoint))
        return self._carried, wish.hold

    def _write(self, plan: Plan, writers: tuple[tuple[WorkerId, ...], ...], checkpoint: CheckpointId) -> None:
        """Let each writer copy its layers at once, and write the copies to the store while training goes on."""
        layers: dict[WorkerId, list[int]] = {}
        for stage, mine in enumerate(writers):
            for worker in mine:
                layers.setdefault(worker, []).extend(share(mine, worker, plan.stages[stage]))
        storage = self._profile.storage
        for worker, shares in layers.items():
            if worker in self._gone:
                continue
            self._tell(worker, protocol.CopiesHeld(checkpoint=checkpoint, layers=tuple(sorted(shares))))
            seconds = self._held.bytes_of(shares) / storage.write + storage.latency
            self._clock.after(seconds, partial(self._written, worker, shares, checkpoint))

    def _written(self, worker: WorkerId, layers: list[int], checkpoint: CheckpointId) -> None:
        if worker in self._gone:
            return
        parts = tuple(
            CheckpointPart(
                layer=layer, file=f"layer-{layer}", bytes=max(1, self._held.bytes_of([layer])), sha256="0" * 64
            )
            for layer in layers
        )
        self._tell(worker, protocol.PartsWritten(checkpoint=checkpoint, parts=parts))

    def commit_checkpoint(self, worker: WorkerId, checkpoint: CheckpointId) -> None:
        self._clock.after(self._profile.storage.latency, partial(self._exists, worker, checkpoint))

    def _exists(self, worker: WorkerId, checkpoint: CheckpointId) -> None:
        if worker not in self._gone:
            self._kept.append(checkpoint)
            self._tell(worker, protocol.CheckpointCommitted(checkpoint=checkpoint))
            self._tell(worker, protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True))

    def find_checkpoint(self, worker: WorkerId, question: protocol.FindCheckpoint) -> None:
        sound = [one for one in self._kept if one not in question.bad]
        found = protocol.CheckpointFound(number=question.number, checkpoint=max(sound, default=None))
        self._clock.after(2 * self._profile.storage.latency, partial(self._answer, worker, found))

    def _answer(self, worker: WorkerId, message: protocol.Message) -> None:
        if worker not in self._gone:
            self._tell(worker, message)

    def report(self, worker: WorkerId) -> None:
        held = dict.fromkeys(sorted(self._held.of(worker)), self.step)
        self._answer(worker, protocol.Report(committed=self.step - 1, held=held))

    def _cut(self, plan: Plan, cut: CheckpointId) -> None:
        """Cut the training: no worker begins another step, and each copies the layers that it holds to host memory."""
        self._idle_since = self._clock.now
        self._cut_state, self._copies = cut, {}
        for worker in sorted(plan.worker_ids() - self._gone.keys()):
            self._copy(plan, worker, sorted(self._held.of(worker)))

    def _copy(self, plan: Plan, worker: WorkerId, stages: Sequence[int]) -> None:
        """Copy a worker's states of these stages for the cut, and report the layers once they are copied."""
        layers = tuple(i for s in stages for i in range(*plan.stages[s]))
        self._copies[worker] = self._copies.get(worker, frozenset()).union(layers)
        if self._cut_state is not None and layers:
            held = protocol.StateHeld(checkpoint=self._cut_state, layers=layers)
            self._clock.after(self._held.bytes_of(layers) / COPY_RATE, partial(self._answer, worker, held))
