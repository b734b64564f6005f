"""Model of step times under a plan: the pipelines' schedule, the gradients' reduction, replicas, the commit. Pure.

Times are cached by their inputs, which hold numbers instead of workers' names, so thousands of equal steps cost as much
as one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, starmap
from typing import Final

import msgspec

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.cell_portions import kept_by, ranges
from bamboo_core.planning.gradient_groups import sums_finished
from bamboo_core.planning.plan import Assignment, Cell, Layout, Plan, WorkerId
from bamboo_core.planning.profile import Layer, ModelFigures
from bamboo_core.planning.schedule import StageOrder, postpones_weights
from bamboo_core.planning.splits.device_stages import cell_of, device_of, devices_of, expanded
from bamboo_core.planning.steps.pipelines import WEIGHT_SHARE, Group, GroupTimes, Place, Run, StepLoss, execute

_BETWEEN = "/"  # between a worker's name and its device's number; no worker's name has it


def on_devices(plan: Plan) -> Plan:
    """Return the plan with a stage for each device and with devices instead of workers as holders. With one device per
    worker it is the same plan.
    """
    devices = devices_of(plan)
    if devices == 1:
        return plan
    whole = expanded(plan)
    rows = tuple(tuple(_on(held, device_of(s, devices)) for s, held in enumerate(row)) for row in whole.pipelines)
    return msgspec.structs.replace(whole, pipelines=rows)


def _on(held: Assignment, number: int) -> Assignment:
    replicas = tuple(f"{worker}{_BETWEEN}{number}" for worker in held.replicas)
    return Assignment(owner=f"{held.owner}{_BETWEEN}{number}", replicas=replicas)


def devices_of_workers(workers: Iterable[WorkerId], devices: int) -> Iterable[tuple[WorkerId, WorkerId]]:
    """Yield (device, worker) for each device of each worker. With one device, both are the worker's name."""
    for worker in workers:
        for number in range(devices):
            yield (f"{worker}{_BETWEEN}{number}" if devices > 1 else worker), worker


def machine(device: WorkerId) -> str:
    """Return the machine of a device: its worker. A worker's devices share connections and need none to each other."""
    return device.partition(_BETWEEN)[0]


ALMOST: Final = 1 - 1e-9  # lowers bounds, as sums of floats depend on their order


@dataclass(frozen=True, slots=True)
class Stages:
    """The seconds and bytes of each stage, summed over its layers."""

    forward: tuple[float, ...]  # seconds of a microbatch, with the engine's overhead
    backward: tuple[float, ...]  # the same
    update: tuple[float, ...]  # seconds of the optimizer's step
    boundary: tuple[int, ...]  # bytes of a microbatch's output: only that of the stage's last layer
    gradients: tuple[int, ...]  # bytes


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group of a plan's pipelines that share workers."""

    group: Group
    rows: list[int]  # their numbers in the plan
    numbers: dict[WorkerId, int]  # of workers in the group

    def cells(self) -> dict[Cell, Place]:
        """Return the group's cells, each with its pipeline's number within the group and its stage."""
        stages = range(len(self.group.forward))
        return {Cell(row, s): (d, s) for d, row in enumerate(self.rows) for s in stages}

    def ends(self, times: GroupTimes) -> dict[Place, float]:
        return {cell: times.ends[d][s] for cell, (d, s) in self.cells().items()}


@dataclass(frozen=True, slots=True)
class AlikePipelines:
    """The pipelines of one grid, each with workers of its own, equal except for their numbers of microbatches."""

    # plan, layout: with one pipeline for each number of microbatches
    plan: Plan
    layout: Layout
    pipelines: int  # the number of pipelines
    sums: frozenset[tuple[float, ...]]  # when the sums that a pipeline sends are finished (`sums_finished`)


class StepModel:
    """A model of a job's step times. figures: for the job's microbatch size. Internally each device of a worker is a
    worker of its own, and transfers on one machine take no time.
    """

    def __init__(self, figures: ModelFigures, spec: JobSpec) -> None:
        self.figures, self._spec = figures, spec
        self._stages: dict[tuple[tuple[int, int], ...], Stages] = {}
        self._groups: dict[Group, GroupTimes] = {}
        self._steps: dict[object, float] = {}

    def stages(self, ranges: tuple[tuple[int, int], ...]) -> Stages:
        if ranges not in self._stages:
            parts = [self.figures.layers[first:end] for first, end in ranges]
            self._stages[ranges] = _summed(parts, self.figures.instruction)
        return self._stages[ranges]

    def seconds(self, plan: Plan, layout: Layout) -> float:
        """Return the seconds from the start of one step to the start of the next, without losses."""
        key = (_shape(plan, layout), layout, plan.stages, plan.device_layers)
        if key not in self._steps:
            self._steps[key] = self._calm(on_devices(plan), layout)
        return self._steps[key]

    def disturbed(
        self, plan: Plan, changes: Sequence[tuple[float, Plan]], layout: Layout, lost: Mapping[WorkerId, float]
    ) -> tuple[float, float]:
        """Return the seconds of a step in which plans change, and the seconds from the last change until the groups of
        pipelines in which cells moved have done their forwards and backwards; 0 if no cell moved.

        changes: at least one (the second of the step at which all workers have a new plan, the plan), in order. lost:
        the second of the step at which each lost worker vanishes.
        """
        gone = {one: lost[worker] for one, worker in devices_of_workers(lost, devices_of(plan))}
        plans, last = [on_devices(plan), *(on_devices(later) for _, later in changes)], changes[-1][0]
        ends: dict[Place, float] = {}
        repeating = 0.0
        for part in self._groups_of(plans[0], layout, plans[1:]):
            losses = [
                loss
                for (at, _), before, after in zip(changes, plans, plans[1:], strict=False)
                if (loss := self._loss(before, after, layout, part, {w: t for w, t in gone.items() if t <= at}, at))
            ]
            times = execute(part.group, *losses) if losses else self._times(part.group)
            if losses:
                repeating = max(repeating, times.end - last)
            ends |= part.ends(times)
        ends = self._added_up(plans[-1], ends)
        return max(self._committed(plans[-1], layout, ends), last), max(0.0, repeating)

    def _loss(
        self,
        before: Plan,
        plan: Plan,
        layout: Layout,
        part: PlannedGroup,
        lost: Mapping[WorkerId, float],
        planned: float,
    ) -> StepLoss | None:
        """Return a group's change from the plan `before` to `plan`: its lost workers and moved cells; None if no cell
        moves. planned: the second of the step at which the change takes effect.
        """
        moved = {cell: place for cell, place in part.cells().items() if _is_moved(before, plan, cell, lost)}
        if not moved:
            return None
        heirs = {cell: plan.at(cell).owner for cell in moved}
        return StepLoss(
            kept=tuple(
                (place, (part.numbers[heirs[cell]], *kept))
                for cell, place in moved.items()
                if (kept := self._kept(before, plan, layout, cell))
            ),
            lost=tuple((part.numbers[w], at) for w, at in lost.items() if w in part.numbers),
            planned=planned,
            runs=tuple((place, _runs(plan, layout, cell, part.numbers)) for cell, place in moved.items()),
        )

    def _kept(self, before: Plan, plan: Plan, layout: Layout, cell: Cell) -> tuple[tuple[int, ...], float] | None:
        """Return the groups whose sums a new owner may get instead of computing them, and the most seconds until it has
        the sums. A group is given by the first microbatch after it, numbered from 0 in the pipeline; the last group is
        left out. Return ((), 0.0) if the owner stays; None if the cell has no portions or no worker has the sums.
        """
        owner, portions, own = plan.at(cell).owner, plan.at(cell).portions, layout.split[cell.pipeline]
        if before.at(cell).owner == owner:
            return (), 0.0
        giver = kept_by(before, owner, {peer.worker for peer in plan.workers}, cell)
        if not portions or giver is None:
            return None
        goes_on = portions[0].worker == owner
        ends = tuple(bound - own[0] for bound in layout.bounds if goes_on and own[0] < bound <= own[-1])
        size = len(ends).bit_length() * self.stages(plan.stages).gradients[cell.stage]
        return ends, 0.0 if giver == owner else self._sync(size, 1)

    def _added_up(self, plan: Plan, ends: Mapping[Place, float]) -> dict[Place, float]:
        """Return the second at which each cell's owner has the sums of all portions. ends: when these are computed."""
        totals = dict(ends)
        for d, s in ends:
            assignment = plan.at(Cell(d, s))
            if any(worker != assignment.owner for worker in assignment.runners):
                totals[d, s] += self._sync(self.stages(plan.stages).gradients[s], 1)
        return totals

    # grids of equal pipelines

    def completed(self, alike: AlikePipelines, ends: Sequence[float]) -> float:
        """Return the seconds of a step from the ends of its stages' passes, by adding the gradients' reduction and the
        commit. ends: by stage, the seconds of the previous step's update and all forwards and backwards, with waits.
        """
        plan, layout = on_devices(alike.plan), alike.layout
        cells = {(d, s): end for d in range(layout.pipelines) for s, end in enumerate(ends)}
        return max(self._committed(plan, layout, cells, alike), self._least(plan, layout, {}))

    def seconds_alike(self, alike: AlikePipelines) -> float:
        """Return the seconds of a step of all these pipelines, like `seconds`. Simulate only the plan's pipelines."""
        return self._calm(on_devices(alike.plan), alike.layout, alike)

    def least_alike(self, alike: AlikePipelines) -> float:
        """Return a lower bound of a step's seconds for any order of instructions: a stage's initial wait, all its
        computing, and the last backward of the stages before it. With one stage, it is the exact time.
        """
        plan = on_devices(alike.plan)
        if len(plan.stages) == 1:
            return self.seconds_alike(alike)
        stages, count = self.stages(plan.stages), max(map(len, alike.layout.split))
        late = postpones_weights(alike.layout.schedule)
        needed = [backward * (1 - WEIGHT_SHARE if late else 1) for backward in stages.backward]  # by the stage before
        begins = list(accumulate(stages.forward, initial=0.0))
        ends, done = [0.0] * len(needed), 0.0
        for s in reversed(range(len(needed))):
            done = max(begins[s] + count * (stages.forward[s] + needed[s]), done + needed[s])
            ends[s] = max(begins[s] + count * (stages.forward[s] + stages.backward[s]), done)
        return ALMOST * self.completed(alike, [ALMOST * end for end in ends])

    # a step without losses

    def _calm(self, plan: Plan, layout: Layout, alike: AlikePipelines | None = None) -> float:
        ends: dict[Place, float] = {}
        work: defaultdict[WorkerId, float] = defaultdict(float)
        for part in self._groups_of(plan, layout):
            times = self._times(part.group)
            ends |= part.ends(times)
            for worker, number in part.numbers.items():
                work[worker] += times.work[number]
        ends = self._added_up(plan, ends)
        return max(self._committed(plan, layout, ends, alike), self._least(plan, layout, work))

    def _times(self, group: Group) -> GroupTimes:
        if group not in self._groups:
            self._groups[group] = execute(group)
        return self._groups[group]

    def _groups_of(self, plan: Plan, layout: Layout, later: Sequence[Plan] = ()) -> list[PlannedGroup]:
        """Return the groups of pipelines that share workers under this plan or a later one."""
        stages, groups = self.stages(plan.stages), []
        for rows in _connected(plan, layout, later):
            names: dict[WorkerId, int] = {}
            plans = [plan, *later]
            cells = [Cell(d, s) for d in rows for s in range(len(plan.stages))]
            for worker in (worker for p in plans for cell in cells for worker in p.at(cell).runners):
                names.setdefault(worker, len(names))
            owners = tuple(tuple(names[plan.at(Cell(d, s)).owner] for s in range(len(plan.stages))) for d in rows)
            busy = [0.0] * len(names)
            for worker, number in names.items():
                busy[number] = sum(stages.update[s] for s in {c.stage for c in plan.owned_by(worker)})
            group = Group(
                forward=stages.forward,
                backward=stages.backward,
                boundary=stages.boundary,
                owners=owners,
                microbatches=tuple(len(layout.split[d]) for d in rows),
                order=StageOrder(layout.schedule),
                network=self.figures.network,
                busy=tuple(busy),
                machines=_machines(names),
                runs=tuple(
                    ((d, c.stage), _runs(plan, layout, c, names))
                    for d, row in enumerate(rows)
                    for c in (Cell(row, s) for s in range(len(plan.stages)))
                    if plan.at(c).portions
                ),
            )
            groups.append(PlannedGroup(group, rows, names))
        return groups

    def _committed(
        self, plan: Plan, layout: Layout, ends: Mapping[Place, float], alike: AlikePipelines | None = None
    ) -> float:
        """Return the second at which all workers have received the commit. ends: when the cells have done their
        forwards and backwards. alike: the equal pipelines that the plan's pipelines represent, if any.
        """
        sums = alike.sums if alike else sums_finished(len(layout.bounds) - 1, layout.pipelines)
        stages, network = self.stages(plan.stages), self.figures.network
        sent: Counter[str] = Counter()
        taken: defaultdict[str, float] = defaultdict(float)  # until when a machine's connections are taken
        synced: defaultdict[str, float] = defaultdict(float)  # until when it syncs replicas, if it runs several cells
        devices = self._spec.worker.devices
        run = {(machine(plan.at(part).owner), cell_of(part, devices)) for part in starmap(Cell, ends)}
        runs = Counter(one for one, _ in run)  # the number of cells of each machine
        ready = 0.0
        for done, s in sorted((max(ends[d, s] for d in range(layout.pipelines)), s) for s in range(len(plan.stages))):
            cells = [Cell(d, s) for d in range(layout.pipelines)]
            owners = list(dict.fromkeys(plan.at(cell).owner for cell in cells))
            number = alike.pipelines if alike else len(owners)
            if number > 1:
                machines = {machine(owner) for owner in owners}
                size = stages.gradients[s] * ((number - 1) / number)  # of a pipeline's sum, and of its reduced chunk
                rate = min(self._link(stages.gradients[s] / number) * (number - 1), network.machine)
                early = max(_early_sums_sent(finished, done, size / rate) for finished in sums)
                over = max(done, early, *(taken[one] for one in machines)) + 2 * size / rate
                for one in machines:
                    sent[one] += round(size * (max(map(len, sums)) + 1))
                    taken[one] = over
                done = over + 2 * network.latency
            for cell in cells:
                owner, strict = machine(plan.at(cell).owner), plan.at(cell).replicas
                if strict and runs[owner] > 1:  # replicas come first, as a lost step might not be repeatable
                    synced[owner] = max(done, synced[owner]) + self._sync(stages.gradients[s], 1) - network.latency
                    ready = max(ready, synced[owner] + network.latency)
                ready = max(ready, done)
        over = max((size / network.machine for size in sent.values()), default=0.0)
        ready = max(ready, over)
        alone = len(runs) == 1 and (alike is None or alike.pipelines == 1)
        return ready + self.figures.commit + (0.0 if alone else 2 * network.latency)

    def _link(self, size: float) -> float:
        """Return the bytes per second of a frame of that size between two workers."""
        return self.figures.network.link(size)

    def _sync(self, size: float, receivers: int) -> float:
        network = self.figures.network
        return network.latency + size / min(self._link(size), network.machine / receivers)

    def _least(self, plan: Plan, layout: Layout, work: Mapping[WorkerId, float]) -> float:
        """Return a lower bound of a step's seconds with any schedule. A replica has to follow within one step, machines
        have to send and receive their frames, and workers have to compute (`work`: seconds) and update their stages.
        """
        stages, network = self.stages(plan.stages), self.figures.network
        out: Counter[str] = Counter()
        into: Counter[str] = Counter()
        followed: Counter[tuple[str, str]] = Counter()  # gradients from one machine to another, for replicas
        holds: dict[WorkerId, set[int]] = {}
        least = 0.0
        last = len(plan.stages) - 1
        for cell in layout.cells(len(plan.stages)):
            assignment, count, number = plan.at(cell), len(layout.split[cell.pipeline]), cell.stage
            size = stages.gradients[number]
            for worker in assignment.holders:
                holds.setdefault(worker, set()).add(number)
            for replica in assignment.replicas:
                out[machine(assignment.owner)] += size
                into[machine(replica)] += size
                followed[machine(assignment.owner), machine(replica)] += size
            if assignment.replicas:
                least = max(least, self._sync(size, len(assignment.replicas)) + stages.update[number] + network.latency)
            here, after = machine(assignment.owner), Cell(cell.pipeline, cell.stage + 1)
            if cell.stage < last and (following := machine(plan.at(after).owner)) != here:
                given = count * stages.boundary[cell.stage]
                for one, other in ((here, following), (following, here)):
                    out[one] += given
                    into[other] += given
        least = max([least, *(size / self._link(size) for size in followed.values())])
        least = max([least, *(total / network.machine for total in (*out.values(), *into.values()))])
        return max([least, *(work.get(w, 0.0) + sum(stages.update[s] for s in held) for w, held in holds.items())])


def _early_sums_sent(finished: Sequence[float], done: float, each: float) -> float:
    """Return the second at which a pipeline has sent all its sums but the last, one after the other.

    finished: when each sum is finished, as a fraction of `done`. each: seconds to send one.
    """
    over = 0.0
    for fraction in finished[:-1]:
        over = max(over, fraction * done) + each
    return over


def _is_moved(before: Plan, plan: Plan, cell: Cell, lost: Mapping[WorkerId, float]) -> bool:
    was, now = before.at(cell), plan.at(cell)
    return not lost.keys().isdisjoint(was.runners) or not now.is_run_as(was)


def _summed(parts: Sequence[Sequence[Layer]], instruction: float) -> Stages:
    def each(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in layers) for layers in parts)

    return Stages(
        forward=tuple(seconds + instruction for seconds in each("forward")),
        backward=tuple(seconds + instruction for seconds in each("backward")),
        update=each("update"),
        boundary=tuple(layers[-1].boundary for layers in parts),
        gradients=tuple(sum(layer.gradients for layer in layers) for layers in parts),
    )


def _runs(plan: Plan, layout: Layout, cell: Cell, numbers: Mapping[WorkerId, int]) -> tuple[Run, ...]:
    """Return the runs of a cell: the microbatches of each of its workers, numbered from 0 in the cell's pipeline.
    numbers: the number of each worker in its group.
    """
    assignment, own = plan.at(cell), layout.split[cell.pipeline]
    if not assignment.portions:
        return ((0, len(own), numbers[assignment.owner]),)
    parts = ranges(layout, cell.pipeline, assignment.portions)
    return tuple((first - own[0], end - own[0], numbers[worker]) for worker, (first, end) in parts)


def _connected(plan: Plan, layout: Layout, later: Sequence[Plan]) -> list[list[int]]:
    """Return the numbers of the layout's pipelines in groups. Pipelines that share a worker under this plan or a later
    one are in one group.
    """
    rows = range(layout.pipelines)
    owners = {d: {w for a in plan.pipelines[d] for w in a.runners} for d in rows}
    for one in later:
        for d in rows:
            owners[d] |= {w for a in one.pipelines[d] for w in a.runners}
    groups: list[tuple[list[int], set[WorkerId]]] = []
    for d in rows:
        mine, workers = [d], set(owners[d])
        for other in [g for g in groups if g[1] & workers]:
            groups.remove(other)
            mine, workers = other[0] + mine, workers | other[1]
        groups.append((mine, workers))
    return [sorted(group) for group, _ in groups]


def _machines(names: Mapping[WorkerId, int]) -> tuple[int, ...]:
    """Return for each device, by number, the number of the first device on the same machine."""
    first: dict[str, int] = {}
    return tuple(first.setdefault(machine(device), number) for device, number in names.items())


def _shape(plan: Plan, layout: Layout) -> object:
    """Return a key of the holders and portions of the layout's cells, with numbers instead of workers' names."""
    names: dict[WorkerId, int] = {}

    def number(worker: WorkerId) -> int:
        return names.setdefault(worker, len(names))

    return tuple(
        tuple((*map(number, a.holders), *((number(p.worker), p.first, p.end) for p in a.portions)) for a in row)
        for row in plan.pipelines[: layout.pipelines]
    )
