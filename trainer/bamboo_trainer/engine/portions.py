"""Portions: a worker's parts of cells whose microbatches several workers share (`bamboo_core.planning.cell_portions`).

`PortionSteps` begins and ends portions, exchanges their sums, and has frames made that neighbouring stages lack.

`KeptSums` holds gradient sums of finished groups of microbatches. A cell's owner sends such sums to the cell's keeper
(another worker), if there is one. If the cell changes hands within a step, the old owner or, if it is lost, the keeper
sends these sums to the new owner, which need not compute them again.
"""

from collections.abc import Container, Iterator, Mapping, Set
from dataclasses import replace

from bamboo_core.planning.cell_portions import Range, changed_cells, keeper, kept_by, ranges
from bamboo_core.planning.plan import Cell, Layout, Plan, WorkerId
from bamboo_core.planning.schedule import Backward, Forward, SendPartialSum
from bamboo_trainer.commit.replication import Replicator
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.ports import EngineContext
from bamboo_trainer.frames import Address, Frame, FrameFacts, FrameKind, is_of_microbatch
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Work, packed_work
from bamboo_trainer.transport.wire import Lane


class KeptSums:
    """Gradient sums (frames) of one step of each cell, for its owner or next owner. No sum includes another one."""

    def __init__(self) -> None:
        self._frames: dict[Cell, list[Frame]] = {}

    def keep(self, frame: Frame) -> None:
        """Keep a sum in place of its parts and older steps' sums; ignore one that is older or part of a kept sum."""
        address = frame.address
        known = [one for one in self._frames.get(address.cell, ()) if one.address.step >= address.step]
        if any(one.address.step > address.step or _is_part(address, one.address) for one in known):
            return
        others = [one for one in known if not _is_part(one.address, address)]
        self._frames[address.cell] = sorted([*others, frame], key=lambda one: one.address.microbatch)

    def all_of(self, cell: Cell, step: int) -> list[Frame]:
        """Return the kept sums of a cell's step, in the order of their microbatches."""
        return [frame for frame in self._frames.get(cell, ()) if frame.address.step == step]

    def of(self, cell: Cell, step: int, microbatches: Range) -> list[Frame]:
        """Return sums within this half-open range, each from where the one before ends, the first from the start."""
        found, (at, end) = list[Frame](), microbatches
        for frame in self.all_of(cell, step):
            if frame.address.microbatch == at and frame.address.part <= end:
                found.append(frame)
                at = frame.address.part
        return found

    def committed(self, step: int) -> None:
        """Drop the sums of a committed step and of earlier steps."""
        self._frames = {c: known for c, known in self._frames.items() if known and known[0].address.step > step}


def _is_part(one: Address, other: Address) -> bool:
    """Return whether the sum `other` includes all microbatches of the sum `one`."""
    return other.microbatch <= one.microbatch and one.part <= other.part


class Pace:
    """A limit on sending sums: `allows` refuses while a frame is in transit, and then for an equal number of calls."""

    def __init__(self) -> None:
        self._rests = 0

    def allows(self, *, is_sending: bool) -> bool:
        """Return whether to send a sum now; call it whenever one could be sent. is_sending: a frame is in transit."""
        if is_sending:
            self._rests += 1
            return False
        if self._rests:
            self._rests -= 1
            return False
        return True


class PortionSteps:
    """This worker's work on portions, by cell and microbatches.

    A cell's new owner delays the cell's first portion while it waits for sums of the first groups from the keeper or
    the old owner; then it continues after these groups. A worker stops running a portion when the cell's owner reports
    that it has the portion's sum. If a neighbouring stage lacks frames that this worker's log does not have, their
    microbatches run again; if their gradients are summed already, only for these frames: the sums stay valid.
    """

    def __init__(self, shared: EngineContext, replicator: Replicator, cells: Mapping[Cell, CellStep]) -> None:
        """Begin without portions. cells: the steps of the cells that this worker owns."""
        self._shared, self._plan, self._outbox, self._states = shared, shared.plan, shared.outbox, shared.states
        self._replicator, self._cells = replicator, cells
        self.kept, self._pace = KeptSums(), Pace()
        self.steps: dict[tuple[Cell, Range], CellStep] = {}
        # cells of which this worker gets sums: the step, from whom
        self._awaited: dict[Cell, tuple[int, WorkerId]] = {}
        self._gives: dict[Cell, int] = {}  # cells whose sums it gives to the new owner, and in which step
        self._wanted: dict[tuple[Cell, int], tuple[int, int]] = {}  # see `_want`
        self._asks: dict[Cell, int] = {}  # by owned cell: the step in which to ask its neighbours for frames
        self._summed: set[tuple[Cell, int, Range]] = set()  # portions whose sum the owner has, by cell and step
        self._early: dict[Address, Frame] = {}  # boundary tensors of portions that have not begun

    def cell_steps(self) -> Iterator[CellStep]:
        """Yield the steps of the cells and portions of cells that run here."""
        yield from self._cells.values()
        yield from self.steps.values()

    # roles

    def keep_finished(self, cell: Cell) -> None:
        """Keep the sums of groups that this worker has finished in a cell, if still intact, for the next owner."""
        for one in self.cell_steps():
            if one.cell == cell:
                self._keep_finished(one)

    def _keep_finished(self, one: CellStep) -> None:
        cell, layout, work = one.cell, one.layout, one.work
        if layout is None or cell.pipeline >= layout.pipelines or one.step <= self._shared.log.newest:
            return
        if work is None or one.final is not None or work.parts or not work.gradients.finished:
            return  # the sum may just be turning into the step's gradient, in the same place
        finished = work.gradients.finished
        microbatches = (layout.bounds[finished[0][0].first], layout.bounds[finished[-1][0].end])
        payload, tensors = packed_work(work, microbatches, finished)
        address = Address(FrameKind.KEPT_SUM, *cell, one.step, *microbatches)
        self.kept.keep(self._outbox.frame(address, tensors, payload))

    def take_over(self, old: Plan | None) -> None:
        """Obey a new plan: ask for missing frames, await or send kept sums. old: the plan before it, if any."""
        changed = changed_cells(self._plan.current, old) if old and not self._plan.current.boundary else set()
        for one in self.cell_steps():
            self._ask_beside(one, self._plan.current.cells() if one.cell in changed else changed)
        if changed:
            newest = self._shared.log.newest
            self._asks = {cell: newest + 1 for cell, owned in self._cells.items() if owned.step <= newest}
        self.await_kept(old, changed)
        for owned in self._cells.values():
            owned.passed = {one for one in owned.passed if one[1].kind is not FrameKind.SUMMED}
            self.gather(owned)
        self.refresh()
        self._give_kept()

    def await_kept(self, old: Plan | None, changed: Set[Cell]) -> None:
        """Update the records of cells whose kept sums this worker awaits as the new owner, or sends to the new owner.

        changed: cells whose owner or portions the plan changes within a step. old: the plan before; None for the first.
        """
        plan, step = self._plan.current, self._shared.log.newest + 1
        present = {peer.worker for peer in plan.workers}
        for cell in {*self._awaited, *self._gives} if plan.boundary else changed:
            self._awaited.pop(cell, None)
            self._gives.pop(cell, None)
        # the boundary plan that removed a cell may never have taken effect here, but only the plan after it
        self._awaited = {cell: one for cell, one in self._awaited.items() if one[1] in present and plan.has(cell)}
        self._gives = {cell: step for cell, step in self._gives.items() if plan.has(cell)}
        self._summed = {one for one in self._summed if not plan.boundary and one[0] not in changed}
        self._wanted = {
            (c, other): wanted
            for (c, other), wanted in self._wanted.items()
            if not plan.boundary and changed.isdisjoint((c, Cell(c.pipeline, other)))
        }
        for cell in changed:
            assert old is not None
            giver = kept_by(old, self._plan.owner(cell), present, cell) if plan.at(cell).portions else None
            if giver and self._plan.owner(cell) == self._plan.worker != giver:
                self._awaited[cell] = step, giver
            elif giver == self._plan.worker != self._plan.owner(cell):
                self._gives[cell] = step

    def _give_kept(self, owner: WorkerId | None = None) -> None:
        """Send kept sums to the new owners of the cells in `_gives`: for each cell, the sums of its first groups up to
        a gap, then KEPT_ALL, then the other sums. owner: the only new owner to send to; None: all.
        """
        for cell, step in self._gives.items():
            receiver = self._plan.owner(cell)
            if owner not in (None, receiver):
                continue
            layout, first, kept = self._shared.layout(step), list[Frame](), self.kept.all_of(cell, step)
            if layout is not None and cell.pipeline < layout.pipelines:
                own = layout.split[cell.pipeline]
                first = self.kept.of(cell, step, (own[0], own[-1] + 1))
            for frame in first:
                self._outbox.post(receiver, frame.address, frame.tensors, frame.payload)
            self._outbox.post(receiver, Address(FrameKind.KEPT_ALL, *cell, step), (), None)
            for frame in (one for one in kept if not any(one is other for other in first)):
                self._outbox.post(receiver, frame.address, frame.tensors, frame.payload)

    def relinked(self, peer: WorkerId) -> None:
        """After a broken link to a peer, resend sums that may be lost; ask its cells' runners for missing frames."""
        plan = self._plan.current
        of_peer = {cell for cell in plan.cells() if peer in plan.at(cell).runners}
        for one in self.cell_steps():
            one.kept = 0  # what was on its way to the keeper may be lost
            self._ask_beside(one, of_peer)
        for owned in self._cells.values():
            owned.passed = {one for one in owned.passed if one[0] != peer}
            self.gather(owned)
        self._give_kept(peer)

    def give_finished(self, one: CellStep, work: Work) -> None:
        """As the owner, send the keeper unsent sums of finished groups if `Pace` allows; none once all are finished."""
        receiver, layout = keeper(self._plan.current, one.cell), one.layout
        finished = work.gradients.finished
        if receiver is None or not finished or layout is None:
            return
        own, end = layout.split[one.cell.pipeline], layout.bounds[finished[-1][0].end]
        is_mine = self._plan.owner(one.cell) == self._plan.worker
        if not is_mine or layout.bounds[finished[0][0].first] != own[0]:
            return  # of several workers that share the cell's microbatches its owner must have the first ones
        if end <= one.kept or end > own[-1]:
            return  # with the last group the cell is done, and its replicas get the step's result
        if not self._pace.allows(is_sending=self._outbox.is_sending(receiver, Lane.BULK)):
            return
        new = [(node, total) for node, total in finished if layout.bounds[node.end] > one.kept]
        nodes = [(node, work.gradients.apart(total)) for node, total in new]
        microbatches = (layout.bounds[nodes[0][0].first], end)
        payload, tensors = packed_work(work, microbatches, nodes)
        self._outbox.post(receiver, Address(FrameKind.KEPT_SUM, *one.cell, one.step, *microbatches), tensors, payload)
        one.kept = end

    # the owner of a shared cell

    def gather(self, owned: CellStep) -> None:
        """Pass a shared cell's known sums to its step and, if useful, its keeper; tell runners of summed portions."""
        cell, step, layout = owned.cell, owned.step, owned.layout
        if not owned.portions or layout is None or step <= self._shared.log.newest:
            return
        if cell.pipeline >= layout.pipelines:
            return  # the job drops the cell's pipeline
        for address, frame in owned.inbox.items():
            if address.kind is FrameKind.PARTIAL_SUM and address.step == step:
                self.kept.keep(replace(frame, address=address._replace(kind=FrameKind.KEPT_SUM)))
        parts, here, portions = self.covered(owned)
        owned.await_sums(parts, self._plan.stages)
        keeps = keeper(self._plan.current, cell) if layout.pipelines > 1 or len(here) < len(parts) else None
        for frame in here:
            owned.accept(replace(frame, address=frame.address._replace(kind=FrameKind.PARTIAL_SUM)))
            if keeps is not None:
                self._pass(owned, keeps, frame)
        dropped = False
        for worker, microbatches in portions:
            if worker == self._plan.worker:
                dropped = self._drop_summed(cell, step, microbatches) or dropped
            else:
                self._pass(owned, worker, self._outbox.frame(Address(FrameKind.SUMMED, *cell, step, *microbatches)))
        if dropped:
            self.refresh(again=True)

    def _pass(self, owned: CellStep, worker: WorkerId, frame: Frame) -> None:
        """Send a frame to a worker, unless `passed` says that it was sent."""
        if (worker, frame.address) not in owned.passed:
            self._outbox.post(worker, frame.address, frame.tensors, frame.payload)
            owned.passed.add((worker, frame.address))

    def covered(self, owned: CellStep) -> tuple[list[Range], list[Frame], list[tuple[WorkerId, Range]]]:
        """Divide a shared cell's microbatches into parts: known sums where they cover whole portions, else portions.

        Return the range of each part, the known sums among the parts, and the portions that these sums cover.
        """
        assert owned.layout is not None
        shared, place = list(ranges(owned.layout, owned.cell.pipeline, owned.portions)), 0
        parts, here, done = list[Range](), list[Frame](), list[tuple[WorkerId, Range]]()
        while place < len(shared):
            first = shared[place][1][0]
            for after in range(len(shared), place, -1):
                last = shared[after - 1][1][1]
                frames = self.kept.of(owned.cell, owned.step, (first, last))
                if frames and frames[-1].address.part == last:
                    parts += [(frame.address.microbatch, frame.address.part) for frame in frames]
                    here, done, place = [*here, *frames], [*done, *shared[place:after]], after
                    break
            else:
                parts.append(shared[place][1])
                place += 1
        return parts, here, done

    def elsewhere(self, owned: CellStep) -> int:
        """Return how many of a shared cell's microbatches are in other workers' portions."""
        assert owned.layout is not None
        shared = ranges(owned.layout, owned.cell.pipeline, owned.portions)
        return sum(end - first for worker, (first, end) in shared if worker != self._plan.worker)

    # frames

    def accept(self, frame: Frame) -> bool:
        """Pass a frame to the portion that runs its microbatch here, or keep it if its step has not begun; else pass it
        to its cell's step. Return False if neither is here.
        """
        address, cell = frame.address, frame.address.cell
        if self._plan.current.at(cell).portions and is_of_microbatch(address) and self._accept_here(frame):
            return True
        owned = self._cells.get(cell)
        if owned is None:
            return False
        owned.accept(frame)
        if address.kind is FrameKind.PARTIAL_SUM:
            self.gather(owned)
        return True

    def _accept_here(self, frame: Frame) -> bool:
        address, stage = frame.address, self._states.stage(frame.address.stage)
        shared = any(portion.worker == self._plan.worker for portion in self._plan.current.at(address.cell).portions)
        if not shared or stage is None or address.step <= self._shared.log.newest:
            return False
        if address.step > stage.values.version:
            self._early[address] = frame
            return True
        for (cell, (first, end)), one in self.steps.items():
            if cell == address.cell and first <= address.microbatch < end:
                one.accept(frame)
                return True
        return False

    def keep(self, frame: Frame) -> bool:
        """Keep a cell's sum unless its step is committed. Return False if this worker is not its keeper or owner."""
        address, plan = frame.address, self._plan.current
        holders = (plan.at(address.cell).owner, keeper(plan, address.cell)) if plan.has(address.cell) else ()
        if self._plan.worker not in holders:
            return False
        if address.step > self._shared.log.newest:
            self.kept.keep(frame)
        if address.cell in self._cells:
            self.gather(self._cells[address.cell])
            self.refresh()
        return True

    def kept_all(self, frame: Frame) -> None:
        """Stop waiting for a cell's kept sums: those of its first groups, if any, are here. Begin the first portion."""
        if self._awaited.pop(frame.address.cell, None) is not None:
            self.refresh()

    def summed(self, sender: WorkerId, address: Address) -> None:
        """If the cell's owner reports that it has a portion's sum, run the portion only for frames still wanted."""
        plan = self._plan.current
        if not plan.has(address.cell) or plan.at(address.cell).owner != sender:
            return
        if self._drop_summed(address.cell, address.step, (address.microbatch, address.part)):
            self.refresh(again=True)

    def _drop_summed(self, cell: Cell, step: int, microbatches: Range) -> bool:
        """Record that a cell's owner has the sum of a portion; return whether this worker was still computing the sum.

        In that case drop the portion; the next `refresh` begins it again, only for frames that neighbours lack.
        """
        self._summed.add((cell, step, microbatches))
        one = self.steps.get((cell, microbatches))
        if one is None or one.step != step or not any(isinstance(i, SendPartialSum) for i in one.program[one.done :]):
            return False
        del self.steps[cell, microbatches]
        return True

    # frames that a neighbouring stage lacks

    def _ask_beside(self, one: CellStep, beside: Container[Cell], *, again: bool = False) -> None:
        """Ask runners of neighbouring cells in `beside` for frames that a step needs. again: also for logged ones."""
        plan, (d, s), step, layout = self._plan.current, one.cell, one.step, one.layout
        if layout is None or d >= layout.pipelines or step <= self._shared.log.newest:
            return
        is_reported = one.next is None and not one.is_portion
        for kind, source in ((FrameKind.ACTIVATION, Cell(d, s - 1)), (FrameKind.GRADIENT, Cell(d, s + 1))):
            if source not in beside:
                continue
            lacks = [a.microbatch for a in one.lacking() if a.kind is kind and is_of_microbatch(a)]
            if is_reported and self._replicator.holds_back(one.cell, step, strict=True):
                lacks = [layout.split[d][0]]  # a replica may have to repeat the step when it is committed
            if lacks:
                address = Address(FrameKind.REPEAT, *source, step, min(lacks), s)
                for worker in plan.at(source).runners:
                    self._outbox.post(worker, address, (), FrameFacts(again=True) if again else None)

    def repeat(self, sender: WorkerId, frame: Frame) -> bool:
        """Begin portions again for unlogged frames that a neighbouring stage lacks; resend logged ones if asked. Return
        False if the step is committed, this worker does not run the cell, or the sender not the neighbouring one.
        """
        address, plan = frame.address, self._plan.current
        beside = Cell(address.pipeline, address.part)
        if not plan.has(address.cell) or not plan.has(beside) or address.step <= self._shared.log.newest:
            return False
        if self._plan.worker not in plan.at(address.cell).runners or sender not in plan.at(beside).runners:
            return False
        self._outbox.finish()  # what is made is in the log
        if frame.again:
            self._outbox.resend(beside, sender, since=address)
        if lacking := self._want(address):
            for portion in lacking:
                self._keep_finished(portion)
            self.refresh(again=True)
        return True

    def _want(self, address: Address) -> list[CellStep]:
        """Record that a neighbouring stage lacks a cell's frames, from the address's microbatch on.

        Drop and return portions that have to run again because some of these frames are not in the log and will not be
        made; the next `refresh` begins them.
        """
        cell, source = address.cell, address.part
        self._wanted[cell, source] = (address.step, address.microbatch)
        found = []
        for (of, microbatches), one in list(self.steps.items()):
            if (of, one.step) == (cell, address.step):
                coming = {i.microbatch for i in one.program[one.done :] if isinstance(i, Forward | Backward)}
                if self._lacking(cell, one.step, microbatches) - coming:
                    found.append(self.steps.pop((of, microbatches)))
        return found

    def lacks(self, owned: CellStep) -> bool:
        """Return whether a neighbouring stage wants frames of this cell's step that this worker's log does not have."""
        layout, pipeline = owned.layout, owned.cell.pipeline
        if layout is None or pipeline >= layout.pipelines:
            return False
        own = layout.split[pipeline]
        return bool(self._lacking(owned.cell, owned.step, (own[0], own[-1] + 1)))

    def _lacking(self, cell: Cell, step: int, microbatches: Range) -> set[int]:
        """Return which of these microbatches have frames that a neighbouring stage wants and the log does not have."""
        found = set[int]()
        for kind, other in ((FrameKind.GRADIENT, cell.stage - 1), (FrameKind.ACTIVATION, cell.stage + 1)):
            wanted, since = self._wanted.get((cell, other), (-1, 0))
            for m in range(max(since, microbatches[0]), microbatches[1]) if wanted == step else ():
                if self._outbox.log.get(Address(kind, cell.pipeline, other, step, m)) is None:
                    found.add(m)
        return found

    # portions begin and end

    def refresh(self, *, again: bool = False) -> None:
        """Begin and drop portions as the plan and the stages' versions require, and pass boundary tensors that are here
        to the steps that take them. again: portions begun now are repetitions, so ask for logged inputs, too.
        """
        plan, begun = self._plan.current, list[CellStep]()
        old, self.steps = self.steps, {}
        for cell in plan.cells():
            portions, stage = plan.at(cell).portions, self._states.stage(cell.stage)
            if not portions or stage is None or stage.values.version >= self._shared.steps:
                continue
            layout = self._shared.layout(stage.values.version)
            if layout is None or cell.pipeline >= layout.pipelines:
                continue
            waits = self._awaited.get(cell, (-1, ""))[0] == stage.values.version
            awaited = layout.split[cell.pipeline][0] if waits else None
            for worker, microbatches in ranges(layout, cell.pipeline, portions):
                if worker == self._plan.worker and microbatches[0] != awaited:
                    key = (cell, microbatches)
                    known = old.get(key)
                    if known is None or (known.step, known.layout) != (stage.values.version, layout):
                        known = self._begin(cell, microbatches, layout, stage)
                        begun.append(known)
                    self.steps[key] = known
        early, self._early = self._early, {}
        frames = list(early.values())
        for cell in {cell for cell, _ in self.steps if cell in self._cells}:
            inbox = self._cells[cell].inbox
            frames += [inbox.pop(address) for address in list(inbox) if is_of_microbatch(address)]
        for frame in frames:
            self.accept(frame)
        for portion in begun:
            self._ask_beside(portion, plan.cells(), again=again)
        for cell, step in list(self._asks.items()):
            owned = self._cells.get(cell)
            if owned is None or owned.step >= step:
                del self._asks[cell]
                if owned is not None:
                    self._ask_beside(owned, plan.cells())

    def _begin(self, cell: Cell, microbatches: Range, layout: Layout, stage: Stage) -> CellStep:
        """Return a portion's new step. It skips summed microbatches unless a neighbouring stage lacks their frames."""
        step, (first, end) = stage.values.version, microbatches
        is_done = (cell, step, microbatches) in self._summed
        is_done = is_done or self._outbox.log.get(Address(FrameKind.PARTIAL_SUM, *cell, step, first, end)) is not None
        kept = [] if is_done else self.kept.of(cell, step, microbatches)
        left = kept[-1].address.part if kept else end if is_done else first
        again = sorted(m for m in self._lacking(cell, step, microbatches) if m < left)
        return CellStep.of_portion(cell, self._plan.stages, layout, microbatches, stage, left, kept, again)
