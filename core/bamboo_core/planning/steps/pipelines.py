"""Simulation of a step's forwards and backwards in virtual time: every cell's program, frame by frame. Pure.

Pipelines that share workers are simulated together, other pipelines each by itself. Like the engine, a worker runs one
instruction at a time, the most urgent one that is ready. Each pair of machines has one link for frames, and a machine's
links share its bandwidth. If a worker is lost, the workers that take over its cells run their programs again, with
frames from other workers' logs.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

from bamboo_core.planning.profile import Network
from bamboo_core.planning.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computed,
    Forward,
    StageOrder,
    portion_program,
)

Place = tuple[int, int]  # pipeline and stage
Frame = tuple[bool, int]  # whether it is a forward's; and the microbatch
Run = tuple[int, int, int]  # the first microbatch, the one after the last, and the worker that runs them
WEIGHT_SHARE: Final = 0.5  # the part of a backward for weight gradients: assumed, as profiles have only whole backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pipelines that share workers, with all inputs that decide their times in a step without losses. Equal groups have
    equal times, so times can be cached by group.
    """

    # forward, backward: seconds of a microbatch, by stage
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    boundary: tuple[int, ...]  # bytes of a stage's output for the next one
    # numbers of workers, [pipeline][stage], from 0 in the order of their first cells
    owners: tuple[tuple[int, ...], ...]
    microbatches: tuple[int, ...]  # by pipeline
    order: StageOrder
    network: Network
    busy: tuple[float, ...]  # seconds until each worker can begin
    # by worker, the number of the first worker on its machine, whose workers share connections; (): each worker has a
    # machine of its own
    machines: tuple[int, ...] = ()
    # for cells that several workers run: the worker of each range of microbatches; an owner runs any other cell alone
    runs: tuple[tuple[Place, tuple[Run, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """A change of plan within a step, and any workers lost before it. lost: each worker and the second of its loss.
    planned: the second at which the plan takes effect. runs: the new runs of each cell that then changes workers.
    """

    lost: tuple[tuple[int, float], ...]
    planned: float
    runs: tuple[tuple[Place, tuple[Run, ...]], ...]
    # cells whose owner has or gets the sums of finished groups: the owner, the microbatch after each group that it may
    # skip, and the seconds after `planned` until it has the sums
    kept: tuple[tuple[Place, tuple[int, tuple[int, ...], float]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """The result of `execute`: when each cell of a group ends, and how long each worker computes."""

    # when each cell has done its forwards and backwards, seconds since the step began, [pipeline][stage]
    ends: tuple[tuple[float, ...], ...]
    work: tuple[float, ...]  # seconds that each worker computed

    @property
    def end(self) -> float:
        return max(max(row) for row in self.ends)


def execute(group: Group, *losses: StepLoss) -> GroupTimes:
    """Simulate the forwards and backwards of a group's step, and return their times. losses: in the order of their
    plans.
    """
    return _Execution(group, losses).run()


def seconds_of(instruction: Computed, forward: float, backward: float) -> float:
    """Return the seconds of an instruction. forward, backward: the seconds of the stage's whole passes."""
    if isinstance(instruction, Forward):
        return forward
    if isinstance(instruction, BackwardWeight):
        return WEIGHT_SHARE * backward
    return (1 - WEIGHT_SHARE) * backward if isinstance(instruction, BackwardInput) else backward


def awaited(instruction: Computed, stage: int, stages: int) -> Frame | None:
    """Return the frame that an instruction waits for; None if it waits for none. Matches the engine's `needs` for
    forwards and backwards.
    """
    if isinstance(instruction, BackwardWeight):
        return None
    first = isinstance(instruction, Forward)
    return None if stage == (0 if first else stages - 1) else (first, instruction.microbatch)


def given(instruction: Computed, place: Place, stages: int) -> tuple[Place, Frame] | None:
    """Return the cell to which an instruction sends a frame, and the frame; None if it sends none."""
    if isinstance(instruction, BackwardWeight):
        return None
    (d, s), first = place, isinstance(instruction, Forward)
    target = (d, s + 1) if first else (d, s - 1)
    return (target, (first, instruction.microbatch)) if 0 <= target[1] < stages else None


@dataclass(eq=False)
class _Cell:
    """A cell in execution, or the part of it that one worker runs."""

    place: Place
    run: Run
    program: list[Computed]  # the rest begins at `done`
    goes_first: bool = False  # before other cells, as other workers run the rest of this one
    done: int = 0
    arrived: set[Frame] = field(default_factory=set)  # (is a forward, microbatch) of arrived frames
    begins: float = 0.0  # the second before which it does not run
    ends: tuple[int, ...] = ()  # the microbatch after each group that may be skipped, as in `StepLoss.kept`
    left: int = 0  # the first microbatch whose gradients are summed; earlier ones run for their frames only

    @cached_property
    def places(self) -> dict[Frame, int]:
        """The index in the program of the instruction that makes each frame: a microbatch's forward or backward."""
        whole = ((at, one) for at, one in enumerate(self.program) if isinstance(one, Forward | Backward))
        return {(isinstance(one, Forward), one.microbatch): at for at, one in whole}

    def finished(self, ends: Collection[int]) -> int:
        """Return the last group end in `ends` up to which all gradients are summed; 0 if there is none."""
        left = (one.microbatch for one in self.program[self.done :] if one.microbatch >= self.left)
        summed = min(left, default=self.run[1])
        return max((end for end in ends if end <= summed), default=0)

    @property
    def is_summed(self) -> bool:
        """Whether this cell's worker has summed the gradients of all microbatches of its run."""
        return not any(one.microbatch >= self.left for one in self.program[self.done :])

    def makes(self, frame: Frame) -> bool:
        """Return whether a remaining instruction produces the frame."""
        return self.places.get(frame, -1) >= self.done

    @property
    def next(self) -> Computed | None:
        return self.program[self.done] if self.done < len(self.program) else None


@dataclass(slots=True)
class _Worker:
    cells: list[_Cell] = field(default_factory=list)
    running: _Cell | None = None
    free: float = 0.0
    work: float = 0.0
    alive: bool = True
    sends: float = 0.0  # until when its machine's connections are taken
    receives: float = 0.0


class _Execution:
    """One step of pipelines that share workers, executed frame by frame. losses: the changes of plan in this step."""

    def __init__(self, group: Group, losses: Sequence[StepLoss]) -> None:
        self._group, self._losses = group, losses
        self._stages = len(group.forward)
        self._workers = [_Worker(free=busy) for busy in group.busy]
        self._machines = group.machines or range(len(group.busy))
        self._cells: dict[Place, list[_Cell]] = {}
        self._log: dict[Place, dict[Frame, int]] = {}  # the frames sent to each cell, and who has each in its log
        self._links: dict[tuple[int, int], float] = {}  # between machines, until when each is taken
        self._ends: dict[Place, float] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []  # time, sequence number, action
        self._count = 0
        runs = dict(group.runs)
        for d, row in enumerate(group.owners):
            for s, worker in enumerate(row):
                whole = (0, group.microbatches[d], worker)
                self._cells[d, s] = [
                    self._begun((d, s), run, taken_over=(d, s) in runs) for run in runs.get((d, s), (whole,))
                ]

    def run(self) -> GroupTimes:
        for number, worker in enumerate(self._workers):
            self._push(worker.free, partial(self._turn, number))
        for loss in self._losses:
            for number, at in loss.lost:
                self._push(at, partial(self._lose, number))
            self._push(loss.planned, partial(self._take_over, loss))
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        return self._times()

    def _times(self) -> GroupTimes:
        rows = range(len(self._group.owners))
        ends = tuple(tuple(self._ends[d, s] for s in range(self._stages)) for d in rows)
        return GroupTimes(ends=ends, work=tuple(w.work for w in self._workers))

    def _push(self, at: float, happens: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, happens))

    def _begun(
        self, place: Place, run: Run, *, taken_over: bool, left: int | None = None, again: Collection[int] = ()
    ) -> _Cell:
        """Create a cell in execution, and add it to its worker.

        left: the first microbatch whose gradients are still to be summed; None: the run's first. again: earlier
        microbatches that run again because other cells need their frames.
        """
        (first, end, worker), order = run, self._group.order
        is_shared = left is not None or end - first < self._group.microbatches[place[0]]
        left = first if left is None else left
        if taken_over:
            program = portion_program(place[1], self._stages, (first, end), order, left, again)
        else:
            program = order.program(place[1], self._stages, range(first, end))
        cell = _Cell(place, run, program, goes_first=taken_over and is_shared, left=left)
        self._workers[worker].cells.append(cell)
        return cell

    def _cell(self, place: Place, microbatch: int) -> _Cell:
        cells = self._cells[place]
        if len(cells) == 1:
            return cells[0]
        return next(cell for cell in cells if cell.run[0] <= microbatch < cell.run[1])

    # work

    def _turn(self, number: int, now: float) -> None:
        """Complete a worker's instruction that ends now, and begin its most urgent one that is ready."""
        worker = self._workers[number]
        if not worker.alive or now < worker.free:
            return
        if worker.running is not None:
            self._finish(number, worker.running, now)
            worker.running = None
        ready = [cell for cell in worker.cells if cell.next and cell.begins <= now and self._has_input(cell, cell.next)]
        if not ready:
            return
        cell = ready[0] if len(ready) == 1 else min(ready, key=lambda c: (*self._urgency(c), -c.place[1]))
        assert cell.next is not None
        stage = cell.place[1]
        seconds = seconds_of(cell.next, self._group.forward[stage], self._group.backward[stage])
        worker.running, worker.free = cell, now + seconds
        worker.work += seconds
        self._push(now + seconds, partial(self._turn, number))

    def _has_input(self, cell: _Cell, instruction: Computed) -> bool:
        frame = awaited(instruction, cell.place[1], self._stages)
        return frame is None or frame in cell.arrived

    def _urgency(self, cell: _Cell) -> tuple[bool, int]:
        """Return a cell's rank as in the engine (`CellStep.urgency`); the worker runs the smallest rank first."""
        place, end = cell.done, len(cell.program)
        while place < end and isinstance(cell.program[place], BackwardWeight):
            place += 1
        if place == end or (place > cell.done and not self._has_input(cell, cell.program[place])):
            return (True, 2)
        return (not cell.goes_first, int(isinstance(cell.program[place], Forward)))

    def _finish(self, number: int, cell: _Cell, now: float) -> None:
        instruction = cell.next
        assert instruction is not None
        if cell not in self._cells[cell.place]:
            return  # another worker runs it now
        cell.done += 1
        sent = given(instruction, cell.place, self._stages)
        if cell.next is None:
            self._note_end(now, cell.place)
        if sent is None:
            return
        target, frame = sent
        self._log.setdefault(target, {})[frame] = number
        self._travel(now, number, target, frame)

    def _note_end(self, now: float, place: Place) -> None:
        if all(one.next is None for one in self._cells[place]):
            self._ends[place] = now

    # frames

    def _travel(self, now: float, sender: int, target: Place, frame: Frame) -> None:
        receiver = self._cell(target, frame[1]).run[2]
        here, destination = self._machines[sender], self._machines[receiver]
        if here == destination:
            self._push(now, partial(self._arrive, receiver, target, frame))
            return
        network, size = self._group.network, self._group.boundary[target[1] - frame[0]]
        source, sink = self._workers[here], self._workers[destination]
        begin = max(now, self._links.get((here, destination), 0.0), source.sends)
        self._links[here, destination] = sent = begin + size / network.link(size)
        source.sends = begin + size / network.machine
        sink.receives = max(begin, sink.receives) + size / network.machine
        at = max(sent, sink.receives) + network.latency
        self._push(at, partial(self._arrive, receiver, target, frame))

    def _arrive(self, receiver: int, place: Place, frame: Frame, now: float) -> None:
        """Deliver a frame. Drop it if the worker no longer runs the cell; the sender's log still has it."""
        cell = self._cell(place, frame[1])
        if cell.run[2] == receiver:
            cell.arrived.add(frame)
        self._turn(receiver, now)

    # losses

    def _lose(self, number: int, now: float) -> None:
        self._workers[number].alive = False

    def _take_over(self, loss: StepLoss, now: float) -> None:
        """Apply a change of plan: give cells to new workers, resend the logged frames that these may lack, and rerun
        microbatches whose frames are in no live worker's log.
        """
        kept = dict(loss.kept)
        for place, runs in loss.runs:
            before = {cell.run: cell for cell in self._cells[place]}
            for run in before.keys() - set(runs):
                self._workers[run[2]].cells.remove(before[run])
            owner, ends, seconds = kept.get(place, (-1, (), 0.0))
            finished, cells = self._cells[place][0].finished(ends), dict(before)
            summed = {m for run, cell in before.items() if place in kept and cell.is_summed for m in range(*run[:2])}
            for run in (run for run in runs if run not in before):
                left = min(max(run[0], finished), run[1]) if run[2] == owner and ends else None
                if summed.issuperset(range(*run[:2])):
                    left = run[1]  # the owner has, or gets, their sums
                cells[run] = self._begun(place, run, taken_over=True, left=left)
                cells[run].ends, cells[run].begins = ends, 0.0 if left is None else now + seconds
            self._cells[place] = [cells[run] for run in runs]
            self._begin(now, [cells[run] for run in runs if run not in before])
        rows = {d for (d, _), _ in loss.runs}
        while lacking := next(self._lacking(rows), None):
            cell, again = lacking
            self._workers[cell.run[2]].cells.remove(cell)
            left = max(cell.finished(cell.ends), cell.left)
            again |= {one.microbatch for one in cell.program[cell.done :] if one.microbatch < cell.left}
            whole = self._begun(cell.place, cell.run, taken_over=True, left=left, again=again)
            whole.ends, whole.begins = cell.ends, cell.begins
            self._cells[cell.place] = [whole if one is cell else one for one in self._cells[cell.place]]
            self._begin(now, [whole])

    def _begin(self, now: float, cells: Sequence[_Cell]) -> None:
        for cell in cells:
            self._ends.pop(cell.place, None)
            self._resend(now, cell)
            self._push(max(now, cell.begins), partial(self._turn, cell.run[2]))

    def _lacking(self, rows: Collection[int]) -> Iterator[tuple[_Cell, set[int]]]:
        """Yield each cell of these pipelines that has to rerun microbatches, with the microbatches. It reruns one if a
        neighbour still needs its frame, no live worker's log has the frame, and no remaining instruction makes it.
        """
        for cell in [one for place, cells in self._cells.items() if place[0] in rows for one in cells]:
            (d, s), logged = cell.place, self._log.get(cell.place, {})
            runs = self._workers[cell.run[2]].running is cell
            frames = {awaited(one, s, self._stages) for one in cell.program[cell.done + runs :]}
            gone = [
                frame
                for frame in frames
                if frame and frame not in cell.arrived
                if not (frame in logged and self._workers[logged[frame]].alive)
            ]
            for first, other in ((True, (d, s - 1)), (False, (d, s + 1))):
                for sender in self._cells.get(other, ()):
                    mine = {m for f, m in gone if f == first and sender.run[0] <= m < sender.run[1]}
                    if again := {m for m in mine if not sender.makes((first, m))}:
                        yield sender, again

    def _resend(self, now: float, cell: _Cell) -> None:
        """Resend the frames of the cell's microbatches from live workers' logs. Note the end of an empty program."""
        needed = {instruction.microbatch for instruction in cell.program}
        logged = [(frame, sender) for frame, sender in self._log.get(cell.place, {}).items() if frame[1] in needed]
        for frame, sender in sorted(logged, key=lambda sent: (sent[0][1], not sent[0][0])):
            if self._workers[sender].alive:
                self._travel(now, sender, cell.place, frame)
        self._note_end(now, cell.place)
