"""The cost model of the published Bamboo simulator: a grid of pipelines, rendezvous, takeovers by neighbours. Pure.

The model has the original's errors: steps go on during a global rendezvous and may begin a second one, which ends
without nodes; a waiting node that is taken away still counts as waiting; a node without a stage that is taken away
slows steps as if a neighbour had taken over; value is the mean over time of each step's ratio, instead of throughput
over cost. It has no lost work, no loading of checkpoints, no zones and no notice.

Times are whole milliseconds. Events of one moment happen in the order of `Kind`, and events of one moment and kind in
the order in which a heap returns them. That order depends on the whole heap, so each step is an event in it, and a
slowed step is two events. Steps between two other events are counted at once only if they leave the heap as it is.
"""

import heapq
import operator
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise

from bamboo.simulation.figures import SimulationError
from nsdi2023.averages import BilledHours, StepAverages
from nsdi2023.nodes import HourlyNodes, Moment
from nsdi2023.workloads import (
    CREATION_MS,
    GLOBAL_RENDEZVOUS_MS,
    SLOWDOWN,
    Workload,
)

HOUR_MS = 3_600_000
MOST_HOURS = 2000
MOST_OVERLOADED = 0.05  # cells of overloaded nodes per running node; above it the pipelines are formed anew
Cell = tuple[int, int]


class Kind(IntEnum):
    """The kinds of events. Events of one moment are handled in this order of kinds."""

    ADD = 1
    REMOVE = 2
    HOUR = 3
    READY = 4
    GLOBAL = 5
    LOCAL = 6
    STEP = 7


class State(StrEnum):
    """The state of a job: stopped, in a rendezvous (it waits until all its workers have met), or running."""

    STOPPED = "stopped"
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


class QueuedEvent(int):
    """An event as one number, from its moment and kind, by which a heap sorts it. Equal numbers have no order."""

    node: str  # the event's node
    number: int  # of the grid that steps


@dataclass(slots=True)
class BilledNode:
    """A node that is present, and therefore billed."""

    created: int
    ready: bool = False
    # it has a stage. A name that comes back before its first node was ready is made ready twice, and stops counting as
    # running the second time, although it keeps its stage
    running: bool = False
    cells: list[Cell] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one simulated run."""

    preemptions: int  # nodes that were taken away
    fatal: int  # preemptions beyond what redundancy could bear
    # interval, lifetime: mean hours between two preemptions, and of all nodes
    interval: float
    lifetime: float
    # nodes, usd_per_hour: means over time
    nodes: float
    throughput: float  # samples per second
    usd_per_hour: float
    value: float  # samples per second per USD per hour, a mean over the steps' time
    hours: float  # until the last step
    steps: int


def simulate(
    workload: Workload,
    events: HourlyNodes | Iterable[Moment],
    *,
    steps: int | None = None,
    milliseconds: int | None = None,
) -> Figures:
    """Simulate a run and return its figures. It ends after `steps` or at `milliseconds`, even within a step; give at
    least one. events: generated hour by hour, or recorded. Raises SimulationError, for example if no step is ever done.
    """
    return Simulation(workload, events, steps, milliseconds).run()


class Simulation:
    """One run of the simulator: its queue of events, its nodes, the present grid, and the records for the figures."""

    def __init__(
        self, workload: Workload, events: HourlyNodes | Iterable[Moment], steps: int | None, milliseconds: int | None
    ) -> None:
        self._workload, self._steps, self._milliseconds = workload, steps, milliseconds
        self._heap: list[QueuedEvent] = []
        self._hours = events if isinstance(events, HourlyNodes) else None
        if isinstance(events, HourlyNodes):
            self._push_moments((0, True, node) for node in events.first())
            self._push(0, Kind.HOUR)
        else:
            self._push_moments(events)
        self._nodes: dict[str, BilledNode] = {}
        self._state = State.STOPPED
        self._listed: list[str] = []
        # the grid
        self._owners: dict[Cell, str] = {}
        self._pipelines = self._waiting = 0
        self._grid = 0  # the number of grids so far; steps of earlier ones do not count
        self._step_ms = 0  # of the next step
        self._slowed_at: int | None = None  # when this grid lost its first node
        self._extended = False  # the step in flight then was extended by its delay
        # records
        self._billed = BilledHours()
        self._done_steps = StepAverages(workload.samples, self._billed)
        self._removals: list[int] = []
        self._lifetimes: list[int] = []
        self._fatal = 0

    def run(self) -> Figures:
        limit = self._milliseconds if self._milliseconds is not None else MOST_HOURS * HOUR_MS
        handlers = {
            Kind.ADD: self._add,
            Kind.REMOVE: self._remove,
            Kind.HOUR: self._hour,
            Kind.READY: self._ready,
            Kind.GLOBAL: self._end_rendezvous,
            Kind.LOCAL: self._end_rendezvous,
            Kind.STEP: self._step,
        }
        heap = self._heap
        now = 0
        while heap:
            event = heapq.heappop(heap)
            if event >> 3 > limit:
                now = limit
                break
            now = event >> 3
            handlers[Kind(event & 7)](now, event)
            if self._done():
                break
            if not heap or heap[0] >> 3 != now:
                self._billed.moment_over(now, len(self._nodes))
                if event & 7 == Kind.STEP:
                    self._complete_alike(now, limit)
        return self._figures(now)

    def _done(self) -> bool:
        return self._done_steps.steps == self._steps

    # nodes

    def _push(self, at: int, kind: Kind, node: str = "", number: int = 0) -> None:
        event = QueuedEvent(at << 3 | kind)
        event.node, event.number = node, number
        heapq.heappush(self._heap, event)

    def _push_moments(self, moments: Iterable[Moment]) -> None:
        for at, added, node in moments:
            self._push(at, Kind.ADD if added else Kind.REMOVE, node)

    def _hour(self, now: int, event: QueuedEvent) -> None:
        assert self._hours is not None
        self._push(now + HOUR_MS, Kind.HOUR)
        self._push_moments(self._hours.hour(now, list(self._nodes)))

    def _add(self, now: int, event: QueuedEvent) -> None:
        self._nodes[event.node] = BilledNode(now)
        self._push(now + CREATION_MS, Kind.READY, event.node)

    def _ready(self, now: int, event: QueuedEvent) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.ready, node.running = True, False
        if self._state is State.STOPPED:
            self._begin_rendezvous(now, Kind.GLOBAL)
        elif self._state is State.RENDEZVOUS:
            self._listed.append(event.node)
        else:
            self._waiting += 1

    def _remove(self, now: int, event: QueuedEvent) -> None:
        node = self._nodes.pop(event.node, None)
        if node is None:
            raise SimulationError(
                f"{event.node} is taken away after {now / HOUR_MS:.2f} hours, when it is not there: in this model nodes"
                " of one moment come before others go, so a name cannot go and come back at one moment"
            )
        self._removals.append(now)
        self._lifetimes.append(now - node.created)
        if not node.running:
            self._slow_down(now)
            return
        heir = self._heir(node.cells[0])
        if len(node.cells) > 1 or (heir and len(heir.cells) > 1):
            self._fatal += 1
            self._begin_rendezvous(now, Kind.GLOBAL)
            return
        if heir:
            heir.cells.append(node.cells[0])
            self._owners[node.cells[0]] = self._owners[heir.cells[0]]
        self._slow_down(now)

    def _heir(self, cell: Cell) -> BilledNode | None:
        """Return the owner of the previous stage (for stage 0 of the last one), or None if it is gone. None also for
        stage 0 after a rendezvous without nodes, which leaves no pipelines although nodes keep their stages.
        """
        pipeline, stage = cell
        if stage == 0 and not self._pipelines:
            return None
        return self._nodes.get(self._owners.get((pipeline, (stage - 1) % self._workload.stages), ""))

    def _slow_down(self, now: int) -> None:
        """Make steps longer after a loss: once per grid, and only while it runs, not in a rendezvous."""
        if self._slowed_at is None and self._state is State.RUNNING:
            self._slowed_at = now
            self._step_ms = int(SLOWDOWN * self._step_ms)

    # rendezvous

    def _begin_rendezvous(self, now: int, kind: Kind) -> None:
        self._state = State.RENDEZVOUS
        self._listed = [name for name, node in self._nodes.items() if node.ready]
        wait = GLOBAL_RENDEZVOUS_MS if kind is Kind.GLOBAL else self._workload.local_rendezvous_ms
        self._push(now + wait, kind)

    def _end_rendezvous(self, now: int, event: QueuedEvent) -> None:
        """Form a grid of the listed nodes, stop if they are too few, or begin again if one of them is gone."""
        if any(name not in self._nodes for name in self._listed):
            self._begin_rendezvous(now, Kind(event & 7))
            return
        stages = self._workload.stages
        self._pipelines = len(self._listed) // stages
        used = self._pipelines * stages
        self._waiting = len(self._listed) - used
        self._slowed_at, self._extended = None, False
        self._grid += 1
        self._state = State.RUNNING if used else State.STOPPED
        listed, self._listed = self._listed, []
        for place, name in enumerate(listed):
            node = self._nodes[name]
            node.running = place < used
            node.cells = [divmod(place, stages)] if node.running else []
        if not used:
            return
        self._owners = {cell: name for name, node in self._nodes.items() for cell in node.cells}
        if self._pipelines not in self._workload.step_ms:
            most = max(self._workload.step_ms)
            raise SimulationError(
                f"{self._pipelines} pipelines of {stages} stages are formed after {now / HOUR_MS:.2f} hours,"
                f" and step times of {self._workload.name} are known for at most {most}"
            )
        self._step_ms = self._workload.step_ms[self._pipelines]
        self._push_step(now + self._step_ms)
        self._done_steps.begin(now)

    # steps

    def _push_step(self, ends: int) -> None:
        self._push(ends, Kind.STEP, number=self._grid)

    def _step(self, now: int, event: QueuedEvent) -> None:
        """Complete a step. If the grid's first loss was in it, first extend it by half of the time left at the loss."""
        if event.number != self._grid:
            return
        if self._slowed_at is not None and not self._extended:
            self._extended = True
            self._push_step(now + int((now - self._slowed_at) * (SLOWDOWN - 1)))
            return
        self._done_steps.complete(now)
        if self._done():
            return
        if self._reconfigures():
            self._begin_rendezvous(now, Kind.LOCAL)
        else:
            self._push_step(now + self._step_ms)

    def _complete_alike(self, now: int, limit: int) -> None:
        """Complete the equal steps before the next other event at once, except the last step of the run.

        Each step would leave the heap and put the next one in, which may move other events. Steps are skipped only if
        no event would move, so that events of one moment keep their order; otherwise steps go on one by one.
        """
        heap = self._heap
        if self._done_steps.last != now or not heap or heap[0] != (now + self._step_ms) << 3 | Kind.STEP:
            return
        before = heap.copy()
        step = heapq.heappop(heap)
        until = min(heap[0] >> 3, limit + 1) if heap else limit + 1
        count = (until - 1 - now) // self._step_ms
        if self._steps is not None:
            count = min(count, self._steps - 1 - self._done_steps.steps)
        others = heap.copy()
        heapq.heappush(heap, step)
        heapq.heappop(heap)
        if count < 1 or step.number != self._grid or not all(map(operator.is_, heap, others)):
            heap[:] = before
            return
        self._done_steps.complete_alike(self._step_ms, count)
        self._push_step(now + (count + 1) * self._step_ms)

    def _reconfigures(self) -> bool:
        cells = self._pipelines * self._workload.stages
        over = sum(node.running and len(node.cells) > 1 for node in self._nodes.values())
        if over and (self._waiting >= over or 2 * over / (cells - over) > MOST_OVERLOADED):
            return True
        return (cells - over + self._waiting) // self._workload.stages > self._pipelines

    # results

    def _figures(self, now: int) -> Figures:
        """Return the figures of the run, which ended at `now`. Preemptions and lifetimes count until `now`, other
        figures until the last step. Raises SimulationError if no step was done, or if the requested steps were not.
        """
        steps, last = self._done_steps.steps, self._done_steps.last
        if not steps:
            raise SimulationError("no step is ever done: there are never enough nodes for one pipeline")
        if self._milliseconds is None and not self._done():
            raise SimulationError(f"the run is not done after {MOST_HOURS} hours, with {steps} steps done")
        lifetimes = [*self._lifetimes, *(now - node.created for node in self._nodes.values())]
        between = [after - at for at, after in pairwise(self._removals)]
        nodes, usd_per_hour = self._billed.averages(last / HOUR_MS)
        throughput, value = self._done_steps.averages()
        return Figures(
            preemptions=len(self._removals),
            fatal=self._fatal,
            interval=statistics.fmean(between) / HOUR_MS if between else 0.0,
            lifetime=statistics.fmean(lifetimes) / HOUR_MS,
            nodes=nodes,
            throughput=throughput,
            usd_per_hour=usd_per_hour,
            value=value,
            hours=last / HOUR_MS,
            steps=steps,
        )
