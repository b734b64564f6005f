"""The executor: obeys plans, runs what is ready, keeps replicas in step, and goes on when a neighbour is gone.

One thread owns all of it. `handle(event)` takes in what happened (a frame, a broken link, a new plan), `turn()` does at
most one piece of work and says whether there was any. Nothing here blocks, reads a clock that was not injected, or
raises because of a peer: the protocol simulator drives the very same class.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from torch import Tensor

from bamboo.histogram import STEP_SECONDS, Histogram
from bamboo.plan import Cell, Layout, Plan, WorkerId
from bamboo.protocol import CellFinished, Message, PeerUp, TakenOver
from bamboo_trainer.commit import committer, replicator, state_comparison
from bamboo_trainer.commit.commit_log import Ledger
from bamboo_trainer.commit.replica_progress import Feed
from bamboo_trainer.engine import plan_activation, redundant_work, reporting
from bamboo_trainer.engine.bubble_budget import Pace
from bamboo_trainer.engine.cell_step import Run
from bamboo_trainer.engine.instructions import execute
from bamboo_trainer.engine.memory_account import Meter
from bamboo_trainer.engine.redundant_work import Shadow
from bamboo_trainer.engine.schedule import Forward, Instruction, ReportReady, needs
from bamboo_trainer.routing.message_log import MessageLog
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import Holding
from bamboo_trainer.transport import payloads
from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp, Transport
from bamboo_trainer.transport.frames import Address, Again, Frame, Kind

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Told before and after every instruction; the trace and the fault injection of the tests are observers.

    event: Idle (nothing that must be done is ready), Epoch (a plan came into force), Takeover, Move (at a boundary).
    """

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def event(self, name: str, **facts: object) -> None: ...


class Engine:
    """One worker's part in the job."""

    def __init__(
        self,
        worker: WorkerId,
        steps: int,
        build: Callable[[int, Sequence[tuple[int, int]]], Stage],
        transport: Transport,
        tell: Callable[[Message], None],
        observer: Observer,
        clock: Callable[[], float],
        lookahead: int,
        on_host: bool = False,
    ) -> None:
        """on_host: what is kept for others only waits in host memory."""
        self.worker, self.steps, self.build = worker, steps, build
        self.lookahead, self.on_host = lookahead, on_host
        self.transport, self.tell, self.observer, self.clock = transport, tell, observer, clock
        self.plan: Plan | None = None
        self.pending: Plan | None = None
        self.holdings: dict[int, Holding] = {}
        self.runs: dict[Cell, Run] = {}
        self.feeds: dict[tuple[Cell, WorkerId], Feed] = {}
        self.shadows: dict[Cell, Shadow] = {}
        self.echoes: dict[Address, Frame] = {}  # gradients for cells that we shadow
        self.pace = Pace()
        self.meter = Meter()
        self.idle_since: float | None = None
        self.ledger = Ledger()
        self.log = MessageLog()
        self.orphans: list[tuple[WorkerId, Frame]] = []
        self.required_epoch = 0
        self.root_since = 0  # epoch
        self.down: set[WorkerId] = set()  # peers whose link is broken
        self.left: dict[Cell, tuple[int, int]] = {}  # cells that went away: first and last step run here
        self.ceded: dict[Cell, Frame] = {}  # the last gradients of cells that moved away, for who owns them now
        self.unheard: set[WorkerId] = set()  # who may know a commit of the root before us
        self.committed_at: float | None = None
        self.step_seconds = Histogram(STEP_SECONDS)  # of the steps that this worker has committed as the root

    # what happened

    def handle(self, event: Event) -> None:
        """Take in what the transport tells."""
        match event:
            case Arrived(sender, frame):
                if self.plan and frame.epoch <= self.plan.epoch and sender not in self.plan.worker_ids():
                    return  # it was declared lost; what it had sent before may still arrive
                self.take(sender, frame)
            case LinkDown(peer):
                plan_activation.link_down(self, peer)
            case LinkUp(peer):
                self.down.discard(peer)
                self.tell(PeerUp(peer=peer))
                plan_activation.relink(self, peer)

    def obey(self, plan: Plan, arrived: float | None = None) -> None:
        """A plan came from the coordinator. arrived: when, if it had to wait for an instruction to end."""
        if self.plan and plan.epoch <= self.plan.epoch:
            return
        if plan.boundary and self.plan is not None and self.required_epoch < plan.epoch:
            self.pending = plan
            return
        self.activate(plan, arrived)

    def activate(self, plan: Plan, arrived: float | None = None) -> None:
        """Obey a plan from now on."""
        begun = self.clock()
        plan_activation.activate(self, plan, begun if arrived is None else arrived)
        self.meter.changed(self, self.step)
        facts = {"reason": plan.reason, "message": plan.message, "boundary": plan.boundary}
        self.observer.event("Epoch", epoch=plan.epoch, seconds=self.clock() - begun, **facts)

    def report(self) -> None:
        """Say everything that the coordinator has to know: it may have been restarted, or messages may be lost."""
        reporting.report(self)

    def trained(self, index: int) -> Stage | None:
        """The stage in its final state, if it is here."""
        stage = self.holdings[index].stage if index in self.holdings else None
        return stage if stage and stage.version >= self.steps else None

    @property
    def newest_plan(self) -> Plan | None:
        """The newest plan that this worker knows, in force or not."""
        return self.pending or self.plan

    # one piece of work

    def turn(self) -> bool:
        """Do the most urgent piece of work; False if there is none."""
        if self.plan is None:
            return False
        for stage, holding in self.holdings.items():
            if holding.owned and self._applicable(holding):
                self._apply(stage, holding)
                return True
        ready = [run for run in self.runs.values() if self._is_ready(run)]
        if ready:
            self._execute(min(ready, key=_urgency))
            return True
        for stage, holding in self.holdings.items():
            if self._applicable(holding):
                self._apply(stage, holding)
                return True
        if committer.decide(self):
            return True
        if self.idle_since is None:
            self.idle_since = self.clock()
            self.observer.event("Idle")
        return redundant_work.turn(self)

    @property
    def step(self) -> int:
        """The step in progress, for heartbeats."""
        return self.ledger.newest + 1

    def waits_for(self) -> str:
        """Why there is no work right now, for a person."""
        return reporting.waits_for(self)

    # instructions

    def _is_ready(self, run: Run) -> bool:
        instruction = run.next
        if instruction is None or run.layout is None or self.plan is None or run.step >= self.steps:
            return False
        if self.required_epoch > self.plan.epoch and run.step > self.ledger.newest:
            return False  # the root has switched to a plan that has not arrived here yet
        if run.predecessor is not None:
            if run.step in self.ledger.commits:
                return False  # its last gradients are on the way; repeating the step would be waste
            run.predecessor = None
        if isinstance(instruction, ReportReady):
            # NB: with the owner of several cells, the log of what they sent to each other is lost, too
            strict = len([r for r in self.runs.values() if r.program]) > 1
            return not any(f.holds_back(run.step, strict) for (c, _), f in self.feeds.items() if c == run.cell)
        return all(address in run.inbox for address in self.needed(run, [instruction]))

    def needed(self, run: Run, instructions: Sequence[Instruction]) -> list[Address]:
        """The frames that these instructions of a cell's step take in."""
        assert self.plan is not None
        assert run.layout is not None
        tied, stages = self.tied_stages(run.cell.stage), len(self.plan.stages)
        return [
            address
            for instruction in instructions
            if not run.has_begun_ahead(instruction)
            for address in needs(instruction, run.cell, stages, run.layout, run.step, tied)
        ]

    def _execute(self, run: Run) -> None:
        instruction = run.next
        assert instruction is not None
        name, microbatch = type(instruction).__name__, getattr(instruction, "microbatch", 0)
        if run.catching:
            inputs = [run.inbox[a] for a in self.needed(run, [instruction])]
            if inputs and not any(f.again for f in inputs):
                self.caught_up(run)  # these were never sent to the one before: what follows is not a repetition
            else:
                run.catching.count(run, instruction)
        begun = self.clock()
        self._waited(run, begun)
        self.observer.started(name, run.cell, run.step, microbatch)
        execute(self, run, instruction)
        run.done += 1
        stage = self.holdings[run.cell.stage].stage
        if stage:
            stage.wait()
        self.observer.finished(name, run.cell, run.step, microbatch)
        ended = self.clock()
        if run.catching:
            run.catching.until = ended
            if run.next is None:
                self.caught_up(run)  # NB: the cell may move on with the commit
        if isinstance(instruction, Forward) and stage:
            self.pace.ran_forward(ended - begun, stage.layers)
        self.meter.executed(self, run)

    def _waited(self, run: Run, until: float) -> None:
        """The wait for the cell's next instruction, or for the step's commit, is over."""
        if self.pace.measures(run.step):
            self.pace.waited((run.cell, run.done), until - self.idle_since if self.idle_since is not None else 0.0)
        self.idle_since = None

    def tied_stages(self, stage: int) -> list[int]:
        """The other stages that share parameters with this one, in order."""
        held = self.holdings[stage].stage
        assert held is not None
        return sorted({s for segment in held.tied_segments() for s in segment.stages} - {stage})

    def emit(self, frame: Frame) -> None:
        """Send a frame to the owner of the cell it is for, and keep it until nobody can need it again."""
        assert self.plan is not None
        self.log.add(frame)
        self.send(self.plan.at(frame.address.cell).owner, frame)
        redundant_work.echo(self, frame)

    def frame(self, address: Address, tensors: tuple[Tensor, ...] = (), meta: Any = None) -> Frame:
        """What is sent, and so the log, lives in host memory."""
        assert self.plan is not None
        return Frame(address=address, epoch=self.plan.epoch, tensors=tuple(t.cpu() for t in tensors), meta=meta)

    def again(self, frame: Frame) -> Frame:
        """A frame from the log, to be sent once more."""
        assert self.plan is not None
        return replace(frame, epoch=self.plan.epoch, meta=Again() if frame.meta is None else frame.meta)

    # optimizer steps

    def _applicable(self, holding: Holding) -> bool:
        return holding.version in self.ledger.commits and holding.version in holding.reduced

    def _apply(self, index: int, holding: Holding) -> None:
        stage, step = holding.stage, holding.version
        assert stage is not None
        assert self.plan is not None
        cell = next((c for c in self.runs if c.stage == index), Cell(0, index))
        name = "OptimizerStep" if holding.owned else "ReplicaUpdate"
        if holding.owned and cell in self.runs:
            self._waited(self.runs[cell], self.clock())
        self.observer.started(name, cell, step, 0)
        stage.apply(holding.reduced.pop(step), self.ledger.commits[step].norm)
        stage.wait()
        self.observer.finished(name, cell, step, 0)
        self.meter.changed(self, step)
        self.shadows = {c: shadow for c, shadow in self.shadows.items() if c.stage != index}
        for run in [r for r in self.runs.values() if r.cell.stage == index]:
            self.begin(run)
        replicator.announce(self, index)
        state_comparison.look(self, index)

    def begin(self, run: Run) -> None:
        """Start the next step of a cell."""
        assert self.plan is not None
        stage = self.holdings[run.cell.stage].stage
        if stage is None:
            return
        if run.catching and run.step >= 0:
            self.caught_up(run)
        if run.done < len(run.program):
            run.since = stage.version  # others ran that step, or a state of after it came: our log does not have it
        tied = bool(self.tied_stages(run.cell.stage))
        run.start(stage, len(self.plan.stages), self.layout(stage.version), tied, self.lookahead)
        if stage.version >= self.steps and not run.finished and run.program:
            run.finished = True
            self.tell(CellFinished(cell=run.cell, digest=stage.digest()))

    def generation(self, step: int) -> int:
        assert self.plan is not None
        return self.ledger.generations.get(step, self.plan.layouts[0].generation)

    def layout(self, step: int) -> Layout | None:
        """None if the plan that has it is still on its way."""
        assert self.plan is not None
        generation = self.generation(step)
        return next((layout for layout in self.plan.layouts if layout.generation == generation), None)

    def caught_up(self, run: Run) -> None:
        catching, run.catching = run.catching, None
        assert catching is not None
        assert self.plan is not None
        taken = TakenOver(
            epoch=self.plan.epoch,
            cell=run.cell,
            step=run.step,
            reform_ms=(catching.applied - catching.arrived) * 1e3,
            recompute_ms=(catching.until - catching.applied) * 1e3,
            forwards=catching.forwards,
            reused=catching.reused,
            backwards=catching.backwards,
        )
        self.tell(taken)
        self.observer.event("Move" if self.plan.boundary else "Takeover", **msgspec.structs.asdict(taken))

    # commits

    def learn(self, commits: payloads.Commits) -> None:
        """What another worker's ledger has."""
        for step, commit in commits:
            committer.committed(self, step, commit)

    # frames

    def send(self, worker: WorkerId, frame: Frame) -> None:
        if worker == self.worker:
            self.take(worker, frame)
        else:
            self.transport.send(worker, frame)

    def take(self, sender: WorkerId, frame: Frame) -> None:
        """A frame arrived, perhaps once more. What is not as its kind must be is told, and dropped."""
        try:
            self._take(sender, payloads.read(frame))
        except payloads.Refused as error:
            logger.warning("refused a %s of %s: %s", frame.address.kind.name, sender, error)

    def _take(self, sender: WorkerId, frame: Frame) -> None:
        """One for a part that we do not have yet waits for the plan."""
        address = frame.address
        if address.kind in (Kind.SYNC, Kind.STATE):  # NB: a commit may bring a plan that takes the part away
            self.learn(frame.meta if address.kind is Kind.SYNC else frame.meta.commits)
        match address.kind:
            case Kind.COMMIT:
                committer.committed(self, address.step, frame.meta)
            case Kind.READY:
                self.ledger.ready(address.step, Cell(address.microbatch, address.part), frame.meta)
            case Kind.HEARD if self.plan and frame.epoch <= self.plan.epoch:
                committer.heard(self, sender, frame)
            case Kind.ASK if self.plan and frame.epoch <= self.plan.epoch:
                replicator.asked(self, sender, address.cell, address.step)
            case Kind.LOGGED | Kind.LOGGED_BULK | Kind.LOGGED_STATE if address.cell in self.runs:
                replicator.answered(self, sender, frame)
            case Kind.SYNC if address.stage in self.holdings:
                replicator.synced(self, address, frame.tensors[0])
            case Kind.STATE if address.stage in self.holdings:
                replicator.restore(self, address, frame)
            case Kind.CHECK if address.stage in self.holdings:
                state_comparison.told(self, sender, address, frame.meta.sums)
            case Kind.ANNOUNCE if (address.cell, sender) in self.feeds:
                self.feeds[address.cell, sender].secured = frame.meta.secured
                replicator.announced(self, address.cell, sender, frame.meta.version, frame.meta.digest)
            case Kind.ACTIVATION | Kind.GRADIENT | Kind.CONTRIBUTION | Kind.RESULT | Kind.TIED if (
                address.cell in self.runs
            ):
                self.runs[address.cell].accept(frame)
            case Kind.GRADIENT if redundant_work.listens(self, frame):
                self.echoes[address] = frame
            case _:
                if frame.epoch > (self.plan.epoch if self.plan else 0):
                    self.orphans.append((sender, frame))  # the plan that gives us this part is on its way


def _urgency(run: Run) -> tuple[int, bool, int]:
    """Oldest step first, then backward before forward, then the later stage."""
    return (run.step, isinstance(run.next, Forward), -run.cell.stage)
