"""The executor: obeys plans, runs what is ready, keeps replicas in step, and goes on when a neighbour is gone.

One thread owns all of it. `handle(event)` takes in what happened (a frame, a broken link, a new plan), `turn()` does at
most one piece of work and says whether there was any. Nothing here blocks, reads a clock that was not injected, or
raises because of a peer: the protocol simulator drives the very same class.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from torch import Tensor

from bamboo.plan import ROOT, Cell, Layout, Plan, WorkerId
from bamboo.protocol import (
    CellFinished,
    LeftBehind,
    Message,
    PeerDown,
    PeerUp,
    PlanApplied,
    ReplicaSynced,
    Report,
    StepCommitted,
    TakenOver,
)
from bamboo_trainer.feed import Feed, Owed
from bamboo_trainer.frames import Address, Frame, Kind
from bamboo_trainer.instructions import execute
from bamboo_trainer.ledger import Commit, Ledger, commit_from, ready_from, to_meta
from bamboo_trainer.message_log import MessageLog
from bamboo_trainer.run import Catching, Run
from bamboo_trainer.schedule import Forward, ReportReady, needs
from bamboo_trainer.stage import Stage
from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp, Transport

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Told before and after every instruction; the trace and the fault injection of the tests are observers."""

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...


@dataclass(slots=True)
class Holding:
    """A stage's state on this worker (None while it is on its way), and final gradients not yet applied."""

    stage: Stage | None
    reduced: dict[int, Tensor] = field(default_factory=dict)
    owned: bool = False

    @property
    def version(self) -> int:
        return self.stage.version if self.stage else -1


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
    ) -> None:
        self.worker, self.steps, self.build = worker, steps, build
        self.transport, self.tell, self.observer, self.clock = transport, tell, observer, clock
        self.plan: Plan | None = None
        self.pending: Plan | None = None
        self.holdings: dict[int, Holding] = {}
        self.runs: dict[Cell, Run] = {}
        self.feeds: dict[tuple[Cell, WorkerId], Feed] = {}
        self.ledger = Ledger()
        self.log = MessageLog()
        self._orphans: list[tuple[WorkerId, Frame]] = []
        self._required_epoch = 0
        self._root_since = 0  # epoch
        self._down: set[WorkerId] = set()  # peers whose link is broken
        self._ceded: dict[Cell, Frame] = {}  # the last gradients of cells that moved away, for who owns them now
        self._unheard: set[WorkerId] = set()  # who may know a commit of the root before us
        self._committed_at: float | None = None

    # what happened

    def handle(self, event: Event) -> None:
        match event:
            case Arrived(sender, frame):
                if self.plan and frame.epoch <= self.plan.epoch and sender not in self.plan.worker_ids():
                    return  # it was declared lost; what it had sent before may still arrive
                try:
                    self._frame(sender, frame)
                except msgspec.ValidationError as error:
                    logger.warning("refused a frame %s of %s: %s", frame.address, sender, error)
            case LinkDown(peer):
                self._link_down(peer)
            case LinkUp(peer):
                self._down.discard(peer)
                self.tell(PeerUp(peer=peer))
                self._relink(peer)

    def obey(self, plan: Plan) -> None:
        """A plan came from the coordinator."""
        if self.plan and plan.epoch <= self.plan.epoch:
            return
        if plan.boundary and self.plan is not None and self._required_epoch < plan.epoch:
            self.pending = plan
            return
        self._activate(plan)

    def report(self) -> None:
        """Say everything that the coordinator has to know: it may have been restarted, or messages may be lost."""
        for peer in sorted(self._down):
            self.tell(PeerDown(peer=peer))
        if self.plan is None:
            return
        self.tell(PlanApplied(epoch=self.plan.epoch))
        for (cell, replica), feed in self.feeds.items():
            if feed.synced:
                self.tell(ReplicaSynced(cell=cell, replica=replica))
        held = {index: holding.version for index, holding in self.holdings.items()}
        self.tell(Report(committed=self.ledger.newest, held=held))
        if ROOT in self.runs:
            for step, commit in self.ledger.latest():
                self._tell_coordinator(step, commit)
        for run in self.runs.values():
            stage = self.holdings[run.cell.stage].stage
            if run.finished and stage:
                self.tell(CellFinished(cell=run.cell, digest=stage.digest()))

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
        for run in self.runs.values():
            if run.catching and run.catching.forwards + run.catching.backwards:
                self._caught_up(run)
        for stage, holding in self.holdings.items():
            if self._applicable(holding):
                self._apply(stage, holding)
                return True
        return self._decide_commit()

    @property
    def step(self) -> int:
        """The step in progress, for heartbeats."""
        return self.ledger.newest + 1

    # instructions

    def _is_ready(self, run: Run) -> bool:
        instruction = run.next
        if instruction is None or run.layout is None or self.plan is None or run.step >= self.steps:
            return False
        if self._required_epoch > self.plan.epoch and run.step > self.ledger.newest:
            return False  # the root has switched to a plan that has not arrived here yet
        if run.predecessor is not None:
            if run.step in self.ledger.commits:
                return False  # its last gradients are on the way; repeating the step would be waste
            run.predecessor = None
        if isinstance(instruction, ReportReady):
            # NB: with the owner of several cells, the log of what they sent to each other is lost, too
            strict = len([r for r in self.runs.values() if r.program]) > 1
            return not any(f.holds_back(run.step, strict) for (c, _), f in self.feeds.items() if c == run.cell)
        tied = self.tied_stages(run.cell.stage)
        wanted = needs(instruction, run.cell, len(self.plan.stages), run.layout, run.step, tied)
        return all(address in run.inbox for address in wanted)

    def _execute(self, run: Run) -> None:
        instruction = run.next
        assert instruction is not None
        name, microbatch = type(instruction).__name__, getattr(instruction, "microbatch", 0)
        if run.catching:
            run.catching.count(instruction)
        self.observer.started(name, run.cell, run.step, microbatch)
        execute(self, run, instruction)
        run.done += 1
        self.observer.finished(name, run.cell, run.step, microbatch)

    def tied_stages(self, stage: int) -> list[int]:
        """The other stages that share parameters with this one, in order."""
        held = self.holdings[stage].stage
        assert held is not None
        return sorted({s for segment in held.tied_segments() for s in segment.stages} - {stage})

    def emit(self, frame: Frame) -> None:
        """Send a frame to the owner of the cell it is for, and keep it until nobody can need it again."""
        assert self.plan is not None
        self.log.add(frame)
        self._send(self.plan.at(frame.address.cell).owner, frame)

    def finalize(self, stage: int, step: int, gradient: Tensor) -> None:
        """The final gradients of a step are known: for our own optimizer step, and for the replicas.

        They come from a cell of ours, or, if none of them runs this step, from the owner whose replica we are.
        """
        holding = self.holdings[stage]
        if step < holding.version or step in holding.reduced:
            return
        holding.reduced[step] = gradient
        for (cell, replica), feed in self.feeds.items():
            if cell.stage == stage and feed.since is not None and feed.since <= step:
                self._send(replica, self.frame(Address(Kind.SYNC, *cell, step), (gradient,)))

    def frame(self, address: Address, tensors: tuple[Tensor, ...] = (), meta: Any = None) -> Frame:
        assert self.plan is not None
        return Frame(address=address, epoch=self.plan.epoch, tensors=tensors, meta=meta)

    # optimizer steps

    def _applicable(self, holding: Holding) -> bool:
        return holding.version in self.ledger.commits and holding.version in holding.reduced

    def _apply(self, index: int, holding: Holding) -> None:
        stage, step = holding.stage, holding.version
        assert stage is not None
        assert self.plan is not None
        cell = next((c for c in self.runs if c.stage == index), Cell(0, index))
        name = "OptimizerStep" if holding.owned else "ReplicaUpdate"
        self.observer.started(name, cell, step, 0)
        stage.apply(holding.reduced.pop(step), self.ledger.commits[step].norm)
        self.observer.finished(name, cell, step, 0)
        for run in [r for r in self.runs.values() if r.cell.stage == index]:
            self._begin(run)
        self._announce(index)
        self.ledger.forget(min((h.version for h in self.holdings.values()), default=stage.version))

    def _begin(self, run: Run) -> None:
        """Start the next step of a cell."""
        assert self.plan is not None
        stage = self.holdings[run.cell.stage].stage
        if stage is None:
            return
        if run.catching and run.step >= 0:
            self._caught_up(run)
        run.start(stage, len(self.plan.stages), self._layout(stage.version), bool(self.tied_stages(run.cell.stage)))
        if stage.version >= self.steps and not run.finished and run.program:
            run.finished = True
            self.tell(CellFinished(cell=run.cell, digest=stage.digest()))

    def _generation(self, step: int) -> int:
        assert self.plan is not None
        return self.ledger.generations.get(step, self.plan.layouts[0].generation)

    def _layout(self, step: int) -> Layout | None:
        """None if the plan that has it is still on its way."""
        assert self.plan is not None
        generation = self._generation(step)
        return next((layout for layout in self.plan.layouts if layout.generation == generation), None)

    def _caught_up(self, run: Run) -> None:
        catching, run.catching = run.catching, None
        assert catching is not None
        assert self.plan is not None
        self.tell(
            TakenOver(
                epoch=self.plan.epoch,
                cell=run.cell,
                step=run.step,
                reform_ms=(catching.applied - catching.arrived) * 1e3,
                recompute_ms=(self.clock() - catching.applied) * 1e3,
                forwards=catching.forwards,
                backwards=catching.backwards,
            )
        )

    # commits

    def _decide_commit(self) -> bool:
        """If this worker owns the root cell: commit the step once every cell has finished it."""
        assert self.plan is not None
        if ROOT not in self.runs or not self.runs[ROOT].program:
            return False
        root, target = self.runs[ROOT], self.pending or self.plan
        if self._unheard or root.step in self.ledger.commits or root.layout is None:
            return False
        commit = self.ledger.decide(
            root.step, len(self.plan.stages), root.layout, target.target.generation, target.epoch
        )
        if commit is None:
            return False
        self._committed(root.step, commit)
        return True

    def _tell_coordinator(self, step: int, commit: Commit, seconds: float = 0.0) -> None:
        assert self.plan is not None
        self.tell(
            StepCommitted(
                step=step,
                generation=self._generation(step),
                loss=commit.loss,
                gradient_norm=commit.norm,
                microbatches=commit.microbatches,
                seconds=seconds,
            )
        )

    def _tell_commit(self, step: int, commit: Commit, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            self._send(worker, self.frame(Address(Kind.COMMIT, *ROOT, step), meta=to_meta(commit)))

    def _committed(self, step: int, commit: Commit) -> None:
        """A step is committed: by this root, or by another one that told us."""
        known = self.ledger.commits.get(step)
        if known is not None:
            if (known.generation, known.epoch) != (commit.generation, commit.epoch):
                logger.error("two different commits of step %d: %s and %s: a bug in Bamboo", step, known, commit)
            return
        self.ledger.record(step, commit)
        self._ceded = {cell: frame for cell, frame in self._ceded.items() if frame.address.step >= step}
        if ROOT in self.runs:  # NB: a commit of the old root may have reached only some; the new one tells everybody
            assert self.plan is not None
            now, before = self.clock(), self._committed_at
            self._committed_at = now
            self._tell_coordinator(step, commit, now - before if before is not None else 0.0)
            workers = self.plan.worker_ids() | (self.pending or self.plan).worker_ids()
            self._tell_commit(step, commit, sorted(workers - {self.worker}))
        self.log.committed(step)
        self._required_epoch = max(self._required_epoch, commit.epoch)
        if self.pending and self.pending.epoch <= self._required_epoch:
            self._activate(self.pending)
        self._look_after_the_repeated()

    def _look_after_the_repeated(self) -> None:
        """Owners that repeat a committed step: its result may exist elsewhere, or what it takes may be gone."""
        assert self.plan is not None
        for run in self.runs.values():
            holding = self.holdings[run.cell.stage]
            repeats = run.program and run.step in self.ledger.commits and run.step not in holding.reduced
            if not repeats or run.predecessor is not None:
                continue
            siblings = [Cell(d, run.cell.stage) for d in range(len(self.plan.pipelines))]
            owners = {self.plan.at(c).owner: c for c in siblings} | {self.worker: run.cell}
            for owner, cell in owners.items():
                if owner != self.worker:
                    self._send(owner, self.frame(Address(Kind.ASK, *cell, run.step)))
            d, s = run.cell
            sources = {Cell(d, t) for t in (s - 1, s + 1, *self.tied_stages(s))}
            gone = any(since > run.step for source, since in run.logged.items() if source in sources)
            if run.step < self.ledger.newest or (gone and len(owners) == 1):
                self.tell(LeftBehind(cell=run.cell))

    def _asked(self, worker: WorkerId, cell: Cell, step: int) -> None:
        holding = self.holdings[cell.stage]
        if holding.version > step:
            self._give_state(cell, worker)
        elif step in holding.reduced:
            self._send(worker, self.frame(Address(Kind.SYNC, *cell, step), (holding.reduced[step],)))

    def _give_state(self, cell: Cell, worker: WorkerId) -> None:
        stage = self.holdings[cell.stage].stage
        assert stage is not None
        tensors, facts = stage.snapshot()
        meta = {"state": facts, "generation": self._generation(stage.version)}
        self._send(worker, self.frame(Address(Kind.STATE, *cell, stage.version), tensors, meta))

    # frames

    def _send(self, worker: WorkerId, frame: Frame) -> None:
        if worker == self.worker:
            self._frame(worker, frame)
        else:
            self.transport.send(worker, frame)

    def _frame(self, sender: WorkerId, frame: Frame) -> None:
        address = frame.address
        match address.kind:
            case Kind.COMMIT:
                self._committed(address.step, commit_from(frame.meta))
            case Kind.READY:
                self.ledger.ready(address.step, Cell(address.microbatch, address.part), ready_from(frame.meta))
            case Kind.HEARD if self.plan and frame.epoch <= self.plan.epoch:
                if frame.epoch >= self._root_since:
                    self._unheard.discard(sender)
            case Kind.ASK if address.cell in self.runs:
                self._asked(sender, address.cell, address.step)
            case Kind.LOGGED if address.cell in self.runs:
                self.runs[address.cell].logged[Cell(address.microbatch, address.part)] = address.step
                self._look_after_the_repeated()
            case Kind.SYNC if address.stage in self.holdings:
                self.finalize(address.stage, address.step, frame.tensors[0])
                self._announce(address.stage)
            case Kind.STATE if address.stage in self.holdings:
                self._restore(address, frame)
            case Kind.ANNOUNCE if (address.cell, sender) in self.feeds:
                self.feeds[address.cell, sender].secured = int(frame.meta["secured"])
                self._announced(address.cell, sender, int(frame.meta["version"]), str(frame.meta["digest"]))
            case Kind.ACTIVATION | Kind.GRADIENT | Kind.CONTRIBUTION | Kind.RESULT | Kind.TIED if (
                address.cell in self.runs
            ):
                self.runs[address.cell].accept(frame)
            case _:
                if frame.epoch > (self.plan.epoch if self.plan else 0):
                    self._orphans.append((sender, frame))  # the plan that gives us this part is on its way

    def _link_down(self, peer: WorkerId) -> None:
        if self.plan is None or peer not in self.plan.worker_ids():
            return
        self._down.add(peer)
        self.tell(PeerDown(peer=peer))
        for run in self.runs.values():
            if run.predecessor == peer:
                run.predecessor = None  # what it owed may be lost; the step can be repeated

    def _relink(self, peer: WorkerId) -> None:
        if self.plan is None or peer not in self.plan.worker_ids():
            return
        for cell, frame in self._ceded.items():
            if self.plan.at(cell).owner == peer:
                self._send(peer, replace(frame, epoch=self.plan.epoch))
        for cell in self.plan.cells():
            if self.plan.at(cell).owner == peer:
                self._resend(cell)
        if ROOT in self.runs:
            for step, commit in self.ledger.latest():
                self._tell_commit(step, commit, [peer])
        elif self.plan.at(ROOT).owner == peer:
            self._introduce()
        for stage in self.holdings:
            self._announce(stage)
        for (cell, replica), feed in self.feeds.items():
            if replica == peer:
                self._owe(cell, replica, feed.relinked(self.holdings[cell.stage].version))

    def _resend(self, cell: Cell) -> None:
        assert self.plan is not None
        for frame in self.log.to(cell):
            self._send(self.plan.at(cell).owner, replace(frame, epoch=self.plan.epoch))
        for run in self.runs.values():
            address = Address(Kind.LOGGED, *cell, run.since, *run.cell)
            self._send(self.plan.at(cell).owner, self.frame(address))

    # replicas

    def _announce(self, stage: int) -> None:
        """Tell the owners of the cells that we replicate which version we hold."""
        assert self.plan is not None
        holding = self.holdings[stage]
        first = holding.stage is not None and holding.version == 0
        digest = holding.stage.digest() if first and holding.stage else ""
        for cell in self.plan.replicated_by(self.worker):
            if cell.stage == stage:
                secured = holding.version + (holding.version in holding.reduced)
                meta = {"version": holding.version, "secured": secured, "digest": digest}
                self._send(self.plan.at(cell).owner, self.frame(Address(Kind.ANNOUNCE, *cell, 0), meta=meta))

    def _announced(self, cell: Cell, replica: WorkerId, version: int, digest: str) -> None:
        stage = self.holdings[cell.stage].stage
        if stage is None:
            return
        feed = self.feeds[(cell, replica)]
        same = not (version == 0 and stage.version == 0) or digest == stage.digest()
        self._owe(cell, replica, feed.announced(version, stage.version, same))
        if feed.caught_up(stage.version):
            self.tell(ReplicaSynced(cell=cell, replica=replica))

    def _owe(self, cell: Cell, replica: WorkerId, owed: Owed) -> None:
        holding = self.holdings[cell.stage]
        stage = holding.stage
        if stage is None or owed is Owed.NOTHING:
            return
        if owed is Owed.STATE:
            self._give_state(cell, replica)
        if stage.version in holding.reduced:
            gradient = holding.reduced[stage.version]
            self._send(replica, self.frame(Address(Kind.SYNC, *cell, stage.version), (gradient,)))

    def _restore(self, address: Address, frame: Frame) -> None:
        holding = self.holdings[address.stage]
        if holding.version >= address.step or self.plan is None:
            return
        stage = holding.stage or self.build(address.stage, self.plan.stages)
        stage.restore(frame.tensors, frame.meta["state"])
        holding.stage = stage
        holding.reduced = {k: g for k, g in holding.reduced.items() if k >= stage.version}
        self.ledger.generations.setdefault(stage.version, int(frame.meta["generation"]))
        for run in [r for r in self.runs.values() if r.cell.stage == address.stage]:
            self._begin(run)
        self._announce(address.stage)

    # plans

    def _activate(self, plan: Plan) -> None:
        arrived, old = self.clock(), self.plan
        self.plan = plan
        if self.pending and self.pending.epoch <= plan.epoch:
            self.pending = None
        self.transport.peers({p.worker: (p.host, p.port) for p in plan.workers if p.worker != self.worker})
        self._take_roles(plan, fresh=old is None and plan.epoch == 1)
        self._down &= plan.worker_ids()
        for cell in [c for c in self.runs if plan.at(c).owner != self.worker] if old else []:
            self._cede(cell)
        if not plan.boundary:
            for run in self.runs.values():
                run.predecessor = None
        self._set_feeds(plan, old)
        for run in self.runs.values():
            if run.layout is None:
                self._begin(run)
        for cell in plan.owned_by(self.worker):
            if cell not in self.runs:
                self._promote(cell, old, arrived)
        for cell in plan.cells() if old else []:
            if old and cell.pipeline < len(old.pipelines) and plan.at(cell).owner != old.at(cell).owner:
                self._resend(cell)
        self._meet_root(old)
        for stage in self.holdings:
            self._announce(stage)
        self._look_after_the_repeated()
        self.tell(PlanApplied(epoch=plan.epoch))
        orphans, self._orphans = self._orphans, []
        for sender, frame in orphans:
            self._frame(sender, frame)

    def _cede(self, cell: Cell) -> None:
        del self.runs[cell]
        if cell.stage in self.holdings:
            step, reduced = self.ledger.newest, self.holdings[cell.stage].reduced
            if step in reduced:
                self._ceded[cell] = self.frame(Address(Kind.SYNC, *cell, step), (reduced[step],))

    def _meet_root(self, old: Plan | None) -> None:
        """A new root decides nothing before it has heard which commits the others know from the root before it."""
        plan = self.plan
        assert plan is not None
        others = plan.worker_ids() - {self.worker}
        if plan.at(ROOT).owner != self.worker:
            self._unheard = set()
            self._introduce()
            return
        if old is None or old.at(ROOT).owner == self.worker:
            self._unheard &= others
            newcomers = others - (old.worker_ids() if old else others)
        else:
            self._unheard, self._root_since, self._committed_at = set(others), plan.epoch, None
            newcomers = others
        for step, commit in self.ledger.latest():
            self._tell_commit(step, commit, sorted(newcomers))
            if newcomers == others:
                self._tell_coordinator(step, commit)

    def _introduce(self) -> None:
        """Tell the root which commits are known here."""
        assert self.plan is not None
        root = self.plan.at(ROOT).owner
        for step, commit in self.ledger.latest():
            self._tell_commit(step, commit, [root])
        self._send(root, self.frame(Address(Kind.HEARD, *ROOT, 0)))

    def _take_roles(self, plan: Plan, fresh: bool) -> None:
        owned = {c.stage for c in plan.owned_by(self.worker)}
        replicated = {c.stage for c in plan.replicated_by(self.worker)}
        for stage in [s for s in self.holdings if s not in owned | replicated]:
            del self.holdings[stage]
        for cell in [c for c in self.runs if c.pipeline >= len(plan.pipelines)]:
            del self.runs[cell]
        for stage in sorted(owned | replicated):
            if stage not in self.holdings:
                assert fresh or stage not in owned, f"{self.worker} is to own stage {stage} and has no state of it"
                new = self.build(stage, plan.stages) if fresh else None
                self.holdings[stage] = Holding(new)
            self.holdings[stage].owned = stage in owned

    def _set_feeds(self, plan: Plan, old: Plan | None) -> None:
        was_mine = set(old.owned_by(self.worker)) if old else set()
        self.feeds = {
            (cell, replica): self.feeds.get((cell, replica), Feed()) if cell in was_mine else Feed()
            for cell in plan.owned_by(self.worker)
            for replica in plan.at(cell).replicas
        }

    def _promote(self, cell: Cell, old: Plan | None, arrived: float) -> None:
        """This worker owns the cell from now on; its state stands where the replica stands."""
        assert self.plan is not None
        run = self.runs[cell] = Run(cell)
        if old is not None and self.plan.boundary and cell.pipeline < len(old.pipelines):
            run.predecessor = old.at(cell).owner
        self._begin(run)
        run.since = run.step
        if old is not None:
            run.catching = Catching(arrived, self.clock())
            if self.plan.boundary and run.step > self.ledger.newest:
                self._caught_up(run)  # a move at the boundary, and nothing is owed


def _urgency(run: Run) -> tuple[int, bool, int]:
    """Oldest step first, then backward before forward, then the later stage."""
    return (run.step, isinstance(run.next, Forward), -run.cell.stage)
