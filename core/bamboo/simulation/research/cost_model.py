"""The cost model of the published Bamboo simulator: a grid of pipelines, rendezvous, takeovers by neighbours. Pure.

Times are whole milliseconds. What happens at one moment happens in the order of `Kind`; events of one kind and moment
in the order in which a heap gives them back. Recordings have many such events, and with them every step is an event,
too, since it changes that order. Made-up hours have few: there the steps between two events are counted at once, since
what a step takes, and what follows it, changes only at events.
"""

import heapq
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise

from bamboo.simulation.figures import Figures, SimulationError
from bamboo.simulation.research.research_events import Moment, ResearchHours
from bamboo.simulation.research.research_workloads import (
    CREATION_MS,
    GLOBAL_RENDEZVOUS_MS,
    SLOWDOWN,
    SPOT_USD,
    Workload,
)

HOUR_MS = 3_600_000
MOST_HOURS = 2000
MOST_OVERLOADED = 0.05  # of all cells; above it the pipelines are formed anew
Cell = tuple[int, int]


class KnownBug(StrEnum):
    """What the published simulator does wrong, and this one does alike unless it is told not to.

    double-rendezvous: steps go on during a global rendezvous and may begin a second one, whose end finds nobody.
    phantom-standby: a waiting node that is taken away goes on counting as one that waits.
    standby-slowdown: a node without a stage that is taken away slows steps down as if a neighbour had taken over.
    mean-of-ratios: value is the mean over time of each step's ratio, instead of throughput over cost.
    """

    DOUBLE_RENDEZVOUS = "double-rendezvous"
    PHANTOM_STANDBY = "phantom-standby"
    STANDBY_SLOWDOWN = "standby-slowdown"
    MEAN_OF_RATIOS = "mean-of-ratios"


class Kind(IntEnum):
    """Of events, in the order in which those of one moment are handled."""

    ADD = 1
    REMOVE = 2
    HOUR = 3
    READY = 4
    GLOBAL = 5
    LOCAL = 6
    STEP = 7


class State(StrEnum):
    """Of the whole job."""

    STOPPED = "stopped"
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


class QueuedEvent(int):
    """Moment and kind as one number, by which events are ordered; those with the same number in no order of their own.

    node: whose event it is. number: of the rendezvous that ends, of the grid that steps.
    """

    node: str
    number: int


@dataclass(slots=True)
class BilledNode:
    """A node that is there, and so billed."""

    created: int
    ready: bool = False
    cells: list[Cell] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchOptions:
    """steps: after which the run ends. milliseconds: after which it is cut, at the last step that is done."""

    steps: int | None = None
    milliseconds: int | None = None
    fixed: frozenset[KnownBug] = frozenset()


def simulate(workload: Workload, events: ResearchHours | Iterable[Moment], options: ResearchOptions) -> Figures:
    """events: made up hour by hour, or recorded. Raises SimulationError if no step is ever done."""
    return Simulation(workload, events, options).run()


class Simulation:
    """One run, and all of its state."""

    def __init__(self, workload: Workload, events: ResearchHours | Iterable[Moment], options: ResearchOptions) -> None:
        self._workload, self._options = workload, options
        self._patched = KnownBug.DOUBLE_RENDEZVOUS in options.fixed
        self._heap: list[QueuedEvent] = []
        self._hours = events if isinstance(events, ResearchHours) else None
        if isinstance(events, ResearchHours):
            self._push_moments((0, True, node) for node in events.first())
            self._push(0, Kind.HOUR)
        else:
            self._push_moments(events)
        self._nodes: dict[str, BilledNode] = {}
        self._state = State.STOPPED
        self._listed: list[str] = []
        self._rendezvous = 0
        # the grid
        self._owners: dict[Cell, str] = {}
        self._pipelines = self._waiting = self._overloaded = 0
        self._slowed = False
        # the step in flight: when it ends, how long the next will take
        self._ends: int | None = None
        self._grid = 0  # how many grids there were
        self._step_ms = 0
        # integrals and records
        self._node_ms = self._counted_until = 0
        self._first: int | None = None  # when the first grid was formed
        self._last = self._last_node_ms = 0  # when the last step was done, and the integral then
        self._steps = 0
        self._value = 0.0
        self._removals: list[int] = []
        self._lifetimes: list[int] = []
        self._fatal = 0

    def run(self) -> Figures:
        limit = self._options.milliseconds if self._options.milliseconds is not None else MOST_HOURS * HOUR_MS
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
        while not self._done():
            until = heap[0] >> 3 if heap else limit + 1
            if self._hours and self._ends is not None and self._ends < min(until, limit + 1):
                self._complete_steps(min(until, limit + 1))
                continue
            if until > limit:
                break
            event = heapq.heappop(heap)
            handlers[Kind(event & 7)](until, event)
        return self._figures()

    def _done(self) -> bool:
        return self._steps == self._options.steps

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
        self._count(now)
        self._nodes[event.node] = BilledNode(now)
        self._push(now + CREATION_MS, Kind.READY, event.node)

    def _ready(self, now: int, event: QueuedEvent) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.ready = True
        if self._state is State.STOPPED:
            self._begin_rendezvous(now, Kind.GLOBAL)
        elif self._state is State.RENDEZVOUS:
            self._listed.append(event.node)
        else:
            self._waiting += 1

    def _remove(self, now: int, event: QueuedEvent) -> None:
        self._count(now)
        node = self._nodes.pop(event.node)
        self._removals.append(now)
        self._lifetimes.append(now - node.created)
        if not node.cells:
            if node.ready and self._state is State.RUNNING and KnownBug.PHANTOM_STANDBY in self._options.fixed:
                self._waiting -= 1
            if KnownBug.STANDBY_SLOWDOWN not in self._options.fixed:
                self._slow_down(now)
            return
        pipeline, stage = node.cells[0]
        heir = self._nodes.get(self._owners[pipeline, (stage - 1) % self._workload.stages])
        if len(node.cells) > 1 or (heir and len(heir.cells) > 1):
            self._fatal += 1
            self._overloaded -= len(node.cells) > 1
            if self._patched:
                self._ends = None
            self._begin_rendezvous(now, Kind.GLOBAL)
            return
        if heir:
            heir.cells.append((pipeline, stage))
            self._owners[pipeline, stage] = self._owners[pipeline, (stage - 1) % self._workload.stages]
            self._overloaded += 1
        self._slow_down(now)

    def _slow_down(self, now: int) -> None:
        """Once for each grid, however many were lost."""
        if not self._slowed:
            self._slowed = True
            self._step_ms = int(SLOWDOWN * self._step_ms)
            if self._ends is not None:
                self._ends = int(self._ends + (SLOWDOWN - 1) * (self._ends - now))

    def _count(self, now: int) -> None:
        self._node_ms += len(self._nodes) * (now - self._counted_until)
        self._counted_until = now

    # rendezvous

    def _begin_rendezvous(self, now: int, kind: Kind) -> None:
        self._state = State.RENDEZVOUS
        self._listed = [name for name, node in self._nodes.items() if node.ready]
        self._rendezvous += 1
        wait = GLOBAL_RENDEZVOUS_MS if kind is Kind.GLOBAL else self._workload.local_rendezvous_ms
        self._push(now + wait, kind, number=self._rendezvous)

    def _end_rendezvous(self, now: int, event: QueuedEvent) -> None:
        """The nodes form a grid, or begin again because one is gone. If nobody is listed, stages stay assigned."""
        if self._patched and event.number != self._rendezvous:
            return
        if any(name not in self._nodes for name in self._listed):
            self._begin_rendezvous(now, Kind(event & 7))
            return
        stages = self._workload.stages
        self._pipelines = len(self._listed) // stages
        used = self._pipelines * stages
        self._waiting, self._slowed = len(self._listed) - used, False
        self._ends = None
        self._grid += 1
        self._state = State.RUNNING if used else State.STOPPED
        listed, self._listed = self._listed, []
        for name in listed:
            self._nodes[name].cells = []
            self._overloaded = 0
        if not used:
            return
        self._owners = {divmod(place, stages): name for place, name in enumerate(listed[:used])}
        for cell, name in self._owners.items():
            self._nodes[name].cells.append(cell)
        if self._pipelines not in self._workload.step_ms:
            most = max(self._workload.step_ms)
            raise SimulationError(
                f"{self._pipelines} pipelines of {stages} stages are formed after {now / HOUR_MS:.2f} hours,"
                f" and step times of {self._workload.name} are known for at most {most}"
            )
        self._step_ms = self._workload.step_ms[self._pipelines]
        self._begin_step(now)
        if self._first is None:
            self._count(now)
            self._first, self._last, self._last_node_ms = now, now, self._node_ms

    # steps

    def _begin_step(self, now: int) -> None:
        self._ends = now + self._step_ms
        if self._hours is None:
            self._push(self._ends, Kind.STEP, number=self._grid)

    def _step(self, now: int, event: QueuedEvent) -> None:
        """A step that was slowed down ends later than its event said."""
        if event.number != self._grid or self._ends is None:
            return
        if self._ends > now:
            self._push(self._ends, Kind.STEP, number=self._grid)
            return
        self._complete(now)
        if self._done():
            return
        if self._reconfigures():
            self._ends = None
            self._begin_rendezvous(now, Kind.LOCAL)
        else:
            self._begin_step(now)

    def _complete_steps(self, until: int) -> None:
        """Those that end before `until`, at which the next event is."""
        assert self._ends is not None
        self._complete(self._ends)
        if self._done():
            return
        if self._reconfigures():
            at, self._ends = self._ends, None
            self._begin_rendezvous(at, Kind.LOCAL)
            return
        self._ends += self._step_ms
        alike = max(0, (until - 1 - self._ends) // self._step_ms + 1)
        if self._options.steps is not None:
            alike = min(alike, self._options.steps - self._steps)
        if alike:
            self._complete(self._ends + (alike - 1) * self._step_ms, alike)
            self._ends += alike * self._step_ms

    def _complete(self, at: int, count: int = 1) -> None:
        """The value of a step is samples per second for each USD per hour: samples over the USD that it cost."""
        self._count(at)
        took, node_ms = at - self._last, self._node_ms - self._last_node_ms
        usd_per_hour = SPOT_USD * node_ms / took
        self._value += count * self._workload.samples / usd_per_hour
        self._steps += count
        self._last, self._last_node_ms = at, self._node_ms

    def _reconfigures(self) -> bool:
        cells = self._pipelines * self._workload.stages
        over = self._overloaded
        if over and (self._waiting >= over or 2 * over / (cells - over) > MOST_OVERLOADED):
            return True
        return (cells - over + self._waiting) // self._workload.stages > self._pipelines

    # results

    def _figures(self) -> Figures:
        if self._first is None or not self._steps:
            raise SimulationError("no step is ever done: there are never enough nodes for one pipeline")
        if self._options.milliseconds is None and not self._done():
            raise SimulationError(f"the run is not done after {MOST_HOURS} hours, with {self._steps} steps done")
        removals = [at for at in self._removals if at <= self._last]
        lifetimes = [*self._lifetimes, *(self._last - node.created for node in self._nodes.values())]
        between = [after - at for at, after in pairwise(removals)]
        seconds = (self._last - self._first) / 1000
        throughput = self._steps * self._workload.samples / seconds
        usd_per_hour = SPOT_USD * self._last_node_ms / self._last
        averaged = KnownBug.MEAN_OF_RATIOS not in self._options.fixed
        return Figures(
            preemptions=len(removals),
            fatal=self._fatal,
            interval=statistics.fmean(between) / HOUR_MS if between else 0.0,
            lifetime=statistics.fmean(lifetimes) / HOUR_MS,
            nodes=self._last_node_ms / self._last,
            throughput=throughput,
            usd_per_hour=usd_per_hour,
            value=self._value / seconds if averaged else throughput / usd_per_hour,
            hours=self._last / HOUR_MS,
            steps=self._steps,
        )
