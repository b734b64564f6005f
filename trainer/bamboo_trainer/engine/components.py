"""The parts of an engine, each with its own state, and the order in which they process events.

`Components` passes each plan, commit, frame and change of a link on to the parts, which also call each other.
"""

from collections import deque
from collections.abc import Mapping

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.protocol import KeepLastState, PeerDown, PlanApplied, ReplicaSynced, Report
from bamboo_core.planning.cell_portions import changed_cells, runner
from bamboo_core.planning.plan import ROOT, Cell, Plan, WorkerId
from bamboo_core.planning.schedule import Computed, Evaluate, ReportReady
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.replication import ArrivedState, RepeatedSteps, Replicator
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.determinism import SpotChecks, StateChecks
from bamboo_trainer.engine.executor import Executor
from bamboo_trainer.engine.layer_copies import LayerCopies
from bamboo_trainer.engine.ports import EngineContext, Ports
from bamboo_trainer.engine.rehearsals import Rehearsals
from bamboo_trainer.engine.stage_times import DeviceTimes, StageTimer
from bamboo_trainer.frames import BOUNDARY, Address, Commit, Frame, FrameKind, is_of_microbatch
from bamboo_trainer.routing import Outbox, PlanState, Received
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates


class Components:
    """The parts of one worker's engine, created anew when the worker begins with a new origin (`Plan.origin`)."""

    def __init__(
        self,
        ports: Ports,
        first: Plan,
        timer: StageTimer,
        queue: deque[Received],
        early: list[Received],
        copies: LayerCopies,
        begun: Mapping[int, Stage],
    ) -> None:
        """Create the parts. first: the plan to begin with. queue: frames to be taken in, including this worker's frames
        to itself. early: frames that wait for a later plan. copies: the copies of layers. begun: by number, the stages
        with whose states this worker begins.
        """
        self._coordinator, self._observer, self._history = ports.coordinator, ports.observer, ports.history
        self._clock, self._queue, self._early = ports.clock, queue, early
        self._timer, self._copies = timer, copies
        self._look_first = self._look_last = True  # for work before instructions, and for work after them
        self._is_idle = False  # nothing that must be done was ready since the last instruction
        self.plan = PlanState(ports.worker, first, ports.devices)
        self.outbox = Outbox(self.plan, ports.transport, queue, ports.copies, receiver=self._receiver)
        self.states = StageStates(ports.builder, ports.on_host, begun)
        self._devices = DeviceTimes(ports.clock, timer, ports.devices)
        self._shared = shared = EngineContext(
            plan=self.plan,
            outbox=self.outbox,
            states=self.states,
            log=CommitLog(first.first_step, ports.policy.loss_unit),
            coordinator=ports.coordinator,
            ports=ports,
            timer=timer,
            devices=self._devices,
        )
        self.committer = Committer(shared, ports.clock, ports.new_id, ports.history, ports.policy)
        self.replicator = Replicator(shared)
        self.repeated = RepeatedSteps(shared, self.replicator)
        self.rehearsals, self.checks, self.spots = Rehearsals(shared), StateChecks(shared), SpotChecks(shared)
        self.executor = Executor(shared, self.committer, self.replicator, self.spots)

    @property
    def step(self) -> int:
        """The step after the newest committed one."""
        return self.committer.log.newest + 1

    def _receiver(self, address: Address) -> WorkerId:
        """Return a frame's receiver: its cell's owner or, for an uncommitted microbatch, the microbatch's runner."""
        assignment = self.plan.current.at(address.cell)
        if not assignment.portions or not is_of_microbatch(address) or self.repeated.is_repeated(address):
            return assignment.owner
        layout = self._shared.layout(address.step)
        return runner(assignment, layout, address.pipeline, address.microbatch) if layout else assignment.owner

    def _look_again(self) -> None:
        """Let the next `turn` look for work of all kinds, and not only for instructions, checks and rehearsals."""
        self._look_first = self._look_last = True
        self.executor.look_again()

    # on a plan

    def on_plan(self, plan: Plan, old: Plan | None, arrived: float, begun: float | None = None) -> None:
        """Obey a plan from now on, and tell the coordinator. old: the plan before it; None for the first.

        arrived: when the plan came or, if it waited for a commit, when that was recorded. begun: when obeying it began,
        if before this call. Both in seconds of the clock.
        """
        begun = self._clock() if begun is None else begun
        self.outbox.finish()  # sends what was made under the earlier plan
        self._look_again()
        self.plan.activate(plan)
        self._history.take_role(plan, self.committer.is_root)  # before it learns that the root's cell has finished
        self.outbox.connect()
        self.states.take_roles(plan, self.plan.worker)
        self.checks.take_roles()
        self.executor.hand_over(old)
        self.replicator.take_roles(old)
        self.executor.take_over(old, arrived)
        for cell in changed_cells(plan, old) if old else ():
            self.outbox.resend(cell)
        self._devices.forget()
        self.rehearsals.take_roles(self.step, first=old is None)
        self._timer.hold(set(self.states))
        self.committer.meet_root(old)
        for stage in self.states:
            self.replicator.announce(stage)
        self._look_at_repeated()
        self._coordinator.tell(PlanApplied(epoch=plan.epoch))
        for stage in self.states:
            self.checks.look(stage)  # checksums of a state that a plan begins with count only from now on
        if old is None:
            self.executor.report()  # cells finished by a restored last step count only from now on
        self._queue.extend(self._early)
        self._early.clear()
        facts = {"reason": plan.reason, "message": plan.message, "boundary": plan.boundary}
        self._observer.event("Epoch", epoch=plan.epoch, seconds=self._clock() - begun, **facts)

    # on a commit

    def on_commit(self, step: int, commit: Commit) -> None:
        """Record a new commit, decided here or received; pass it on, and obey a waiting plan that is due with it."""
        if not self.committer.record(step, commit):
            return
        self._look_again()
        self._history.committed(step, commit)
        self.spots.committed(step)
        for stage in self.states if commit.early_stop else ():
            self.checks.look(stage)
        self.executor.committed(step)
        if self.committer.is_root:
            self.committer.publish(step, commit)
        self.outbox.log.committed(step)
        self._copies.committed(self.plan.current.origin, step)
        plan = self.plan.require(commit.epoch)
        if plan:
            self.on_plan(plan, self.plan.current, self._clock())
        self._look_at_repeated()

    # on a frame

    def on_frame(self, sender: WorkerId, frame: Frame) -> None:
        """Process a frame of this or another worker; keep it if a plan that is on its way may need it here."""
        kind, address = frame.address.kind, frame.address
        known, cell = frame.epoch <= self.plan.current.epoch, address.cell
        if kind not in BOUNDARY:
            self._look_again()
        elif not known:
            self._keep_early(sender, frame)  # a plan on its way may give this worker the part that needs it
        match kind:
            case (
                FrameKind.ACTIVATION
                | FrameKind.GRADIENT
                | FrameKind.CONTRIBUTION
                | FrameKind.RESULT
                | FrameKind.TIED
                | FrameKind.PARTIAL_SUM
            ) if self.plan.current.has(cell) and self.executor.portions.accept(frame):
                pass
            case FrameKind.KEPT_SUM if known and self.executor.portions.keep(frame):
                pass
            case FrameKind.KEPT_ALL if known:
                self.executor.portions.kept_all(frame)
            case FrameKind.REPEAT if known and self.executor.repeat(sender, frame):
                pass
            case FrameKind.SUMMED if known:
                self.executor.portions.summed(sender, address)
            case FrameKind.COMMIT:
                self.on_commit(address.step, frame.payload)
            case FrameKind.READY:
                self.committer.log.ready(address.step, frame.payload, sender)
            case FrameKind.HEARD if known:
                self._on_commits(frame)
                self.committer.report_received(sender, frame.epoch)
            case FrameKind.HISTORY:
                self._history.heard(frame.payload)
            case FrameKind.EVALUATIONS:
                self.committer.evaluations_received(frame.payload)
            case FrameKind.ASK if known:
                self.repeated.answer(sender, cell, address.step, self.executor.since())
            case FrameKind.LOGGED | FrameKind.LOGGED_BULK | FrameKind.LOGGED_STATE if cell in self.executor.cells:
                if self.executor.cells[cell].step == address.step and self.repeated.answered(sender, frame):
                    self._look_at_repeated()
            case FrameKind.SYNC | FrameKind.LAYER:
                self._on_commits(frame)  # a commit may bring a plan into force that takes the part away
                self._on_state(sender, frame)
            case FrameKind.SPOT_CHECK if known:
                self.spots.asked(sender, frame)
            case FrameKind.ANNOUNCE if (cell, sender) in self.replicator.progress:
                self.replicator.announced(cell, sender, frame.epoch, frame.payload)
            case _:
                self._keep_early(sender, frame)

    def _on_commits(self, frame: Frame) -> None:
        """Process the newest commits of another worker's log, which a frame carries."""
        commits = frame.payload.filling.commits if frame.address.kind is FrameKind.LAYER else frame.payload
        for step, commit in commits:
            self.on_commit(step, commit)

    def _on_state(self, sender: WorkerId, frame: Frame) -> None:
        """Process the final gradient of a stage, or a layer of its state, from another worker."""
        address, stage = frame.address, frame.address.stage
        if stage not in self.states:
            self._keep_early(sender, frame)
            return
        if address.kind is FrameKind.SYNC:
            self.replicator.received(address, frame.tensors[0])
        else:
            self.replicator.layer_arrived(frame)
        while (state := self.replicator.next_state()) is not None:
            self._restore(state)

    def _restore(self, state: ArrivedState) -> None:
        stage = state.cell.stage
        self._finish_copies(stage)
        if self.replicator.restore(state):
            self._reached(stage)
            self.executor.begin(stage)
            self.replicator.skipped(stage)
            self.replicator.announce(stage)
            self.checks.look(stage)

    def _keep_early(self, sender: WorkerId, frame: Frame) -> None:
        if frame.epoch > self.plan.current.epoch:
            self._early.append((sender, frame))

    # on a link

    def on_link_down(self, peer: WorkerId) -> None:
        self._look_again()
        if self.plan.link_broke(peer):
            self._coordinator.tell(PeerDown(peer=peer))
            self.executor.link_broke(peer)

    def on_link_up(self, peer: WorkerId) -> None:
        """Handle a restored link to a peer: resend the frames that may have been lost, and request the peer's again."""
        self._look_again()
        if not self.plan.link_stands(peer):
            return
        self.executor.relinked(peer)
        for cell in self.plan.current.cells():
            if peer in self.plan.current.at(cell).runners:
                self.outbox.resend(cell)
        self.repeated.ask_again()
        self._look_at_repeated()
        self.committer.relinked(peer)
        for stage in self.states:
            self.replicator.announce(stage)
        self.replicator.relinked(peer)

    # one piece of work

    def turn(self) -> bool:
        """Do the most urgent piece of work; return False if there is none.

        Look for other work than instructions, checks and rehearsals only after `_look_again`, or while the job pauses.
        """
        self.outbox.advance()
        if self._look_first and self._do_first():
            return True
        self._look_first = False
        ready = self.executor.next_ready()
        if ready:
            self._execute(ready)
            return True
        if self._look_last and self._do_last():
            return True
        self._look_last = self.committer.pauses  # in case a pause goes on
        if self.committer.cut is not None:
            return False
        if not self._is_idle:
            self._is_idle = True
            self._observer.event("Idle")
        if self.spots.turn([cell for cell in self.spots.asked_of() if self.executor.waits_at_end(cell)]):
            return True
        return self.rehearsals.turn(self.executor.active())

    def _do_first(self) -> bool:
        """Do work that precedes all instructions; return False if there is none."""
        if self.spots.turn_at_last():
            return True
        if self.replicator.owes_gradients:
            self._report_or_send()
            return True
        applicable = self.states.applicable(self.committer.log.to_apply(), self.executor.ran(), owned=True)
        if applicable is not None:
            self._apply(applicable)
            return True
        return False

    def _do_last(self) -> bool:
        """Do work that waits until no instruction can run; return False if there is none."""
        applicable = self.states.applicable(self.committer.log.to_apply(), self.executor.ran(), owned=False)
        if applicable is not None:
            self._apply(applicable)
            return True
        return self._decide() or self._copy_piece()

    def _execute(self, cell_step: CellStep) -> None:
        if not isinstance(cell_step.next, Evaluate | Computed):
            self._look_again()
        self._is_idle = False
        self.executor.execute(cell_step)

    def _report_or_send(self) -> None:
        """Report a step if a report is ready; otherwise send a replica the oldest queued final gradients, before the
        optimizer's step drops them. Reports go first because copying gradients is slow. A report that has to wait for a
        replica's state or gradients is not ready.
        """
        reporting = self.executor.next_ready(only=ReportReady)
        if reporting:
            self._execute(reporting)
        else:
            self.replicator.send_next()

    def _apply(self, index: int) -> None:
        """Apply a committed step (`StageStates.apply`) to a stage that runs here, or to a replica."""
        self._look_again()
        state, step = self.states.by_stage[index], self.states.version(index)
        cell_steps = self.executor.of_state(index)
        cell = cell_steps[0].cell if cell_steps else Cell(0, index)
        if state.owned:
            self._is_idle = False
        self._finish_copies(index)
        name = "OptimizerStep" if state.owned else "ReplicaUpdate"
        tries = state.owned and any(map(self.spots.checks, cell_steps))
        self._observer.started(name, cell, step, 0)
        with self._devices.measuring(state.stage):
            self.states.apply(index, self.committer.log.commits[step], tries=tries)
        self._observer.finished(name, cell, step, 0)
        self._reached(index)
        self.executor.begin(index)
        self.replicator.announce(index)
        self.checks.look(index)

    def _reached(self, index: int) -> None:
        """Copy a stage's new state if needed: from now on piece by piece for a checkpoint, at once for a cut."""
        values = self.states[index]
        commit = self.committer.log.commits.get(values.version - 1)
        self._copies.reached(index, values, commit.checkpoint if commit else None, self.plan.current)
        self._hand_over_copies()
        self._hold(index)

    def hold(self, cut: CheckpointId) -> None:
        """Stop at the state `cut`, where the layers are split anew, and copy it, unless a later step is committed."""
        self._look_again()
        if self.committer.hold(cut):
            for index in self.states:
                self._hold(index)

    def _hold(self, index: int) -> None:
        """Copy a stage's state at once if the layers are split anew after it (`Committer.cut`)."""
        values, cut = self.states.here(index), self.committer.cut
        if values is not None and cut is not None and values.version == cut.step:
            self._copies.hold(self.plan.current.origin, cut, values.layer_states(shown=False))

    def _finish_copies(self, index: int) -> None:
        """Finish the copies of a state that is about to change."""
        self._copies.finish(index)
        self._hand_over_copies()

    def _copy_piece(self) -> bool:
        """Copy a piece of a state for a checkpoint; return False if there is none."""
        copied = self._copies.advance()
        self._hand_over_copies()
        return copied

    def _hand_over_copies(self) -> None:
        """Hand complete copies to the checkpoint writer, but first tell the coordinator if checksums have changed."""
        for index in self._copies.complete():
            self.checks.copied(index)
        self._copies.hand_over()

    def _decide(self) -> bool:
        """As the root, commit the step in progress if `Committer.decide` returns a commit; else return False."""
        root = self.executor.cells.get(ROOT)
        if root is None or not root.program or root.layout is None:
            return False
        commit = self.committer.decide(root.step, root.layout)
        if commit is None:
            return False
        self.on_commit(root.step, commit)
        return True

    def _look_at_repeated(self) -> None:
        self.repeated.look(self.executor.repeated(), self.executor.since())

    # queries

    def keep_last(self, wanted: KeepLastState) -> bool:
        """Start to copy this worker's part of the last state for a checkpoint. Return False if it is not here."""
        self._look_again()
        is_held = self._copies.keep_last(wanted, self.states, self.plan.current)
        self._hand_over_copies()
        return is_held

    def report(self) -> None:
        """Report to the coordinator again, as it may have restarted, or messages may be lost."""
        for peer in sorted(self.plan.links_down):
            self._coordinator.tell(PeerDown(peer=peer))
        self._coordinator.tell(PlanApplied(epoch=self.plan.current.epoch))
        for cell, replica in self.replicator.synced():
            self._coordinator.tell(ReplicaSynced(cell=cell, replica=replica))
        held = {index: self.states.version(index) for index in self.states}
        self._coordinator.tell(Report(committed=self.committer.log.newest, held=held))
        self.committer.report()
        self.executor.report()
        self.checks.report()
