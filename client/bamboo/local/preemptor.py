"""Deliberate preemptions in a local run, by a schedule or on request."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from bamboo.local.scheduling import Preemption, Schedule, due, room_at, steps_of, victim
from bamboo_core.coordinator.events import Status
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A preemption to carry out now: the worker to kill, or with `notice` to warn first."""

    worker: WorkerId
    notice: bool
    where: str = ""  # end of the message: the point in the step, or the worker whose node is lost; "" for neither


@dataclass(frozen=True, slots=True, kw_only=True)
class _MidStep:
    """A planned preemption, due once the worker has done `after` forwards and backwards of the step, or is past it."""

    worker: WorkerId
    action: Preemption
    step: int
    after: int


class Preemptor:
    """The policy that chooses which workers a local run preempts, and when; the caller kills them.

    In the steps of `gate` every worker asks before each forward and backward (`ForkServer`), so that the run can take
    the worker in the middle of a step, however fast the machine is.

    microbatches: number of microbatches in a step, over all pipelines. lost_with: returns the other living workers on a
    worker's node, which are taken with it. per_node: workers that fit on a node.
    """

    def __init__(
        self,
        schedule: Schedule,
        microbatches: int,
        lost_with: Callable[[WorkerId], Iterable[WorkerId]] = lambda _: (),
        per_node: int = 1,
    ) -> None:
        self.gate = steps_of(schedule)
        self._schedule, self._microbatches, self._lost_with = schedule, microbatches, lost_with
        self._per_node = per_node
        self._mid_step: list[_MidStep] = []
        self._begun: dict[WorkerId, tuple[int, int]] = {}  # (step, number of its forwards and backwards)
        self._taken: set[WorkerId] = set()

    def was_taken(self, worker: WorkerId) -> bool:
        return worker in self._taken

    def room(self, recorded: float, alive: Collection[WorkerId]) -> int | None:
        """Return how many more workers fit on the nodes that the recording has after `recorded` seconds.

        Negative if there are too many workers; None if the schedule has no recorded nodes.
        """
        room = room_at(self._schedule, recorded)
        return None if room is None else room.nodes * self._per_node - len(set(alive) - self._taken)

    def leaves_none(self, recorded: float) -> bool:
        """Return whether the recording has no node from second `recorded` on; False without recorded nodes."""
        last = self._schedule.rooms[-1:]
        return any(room.at <= recorded and not room.nodes for room in last)

    def begins(self, worker: WorkerId, step: int) -> None:
        """Record that the worker is about to begin its next forward or backward of a step."""
        before, count = self._begun.get(worker, (step, 0))
        self._begun[worker] = (step, count + 1 if before == step else 1)

    def take(self, worker: WorkerId, *, notice: bool, where: str = "") -> Iterator[Strike]:
        """Mark a worker and the other workers of its node as taken, and yield a strike for each.

        A worker on notice gets no second notice, but may be killed.
        """
        for one in (worker, *self._lost_with(worker)):
            if not notice or one not in self._taken:
                self._taken.add(one)
                yield Strike(worker=one, notice=notice, where=where if one == worker else f", with {worker}'s node")

    def due(
        self,
        step: int,
        in_progress: int,
        seconds: float,
        recorded: float,
        alive: Collection[WorkerId],
        shown: Callable[[], Status],
    ) -> Iterator[Strike | None]:
        """Yield the strikes of the preemptions that are due now; None for a preemption without a worker to take.

        step: the newest known step of any worker. in_progress: the step after the last commit. seconds: seconds of
        training so far. recorded: seconds for which the recording has been played. shown: returns the job's status.
        """
        actions, self._schedule = due(self._schedule, step, seconds)
        for action in actions:
            yield from self._plan_or_take(action, shown())
        reached = [planned for planned in self._mid_step if in_progress > planned.step or self._reached(planned)]
        self._mid_step = [planned for planned in self._mid_step if planned not in reached]
        for planned in reached:
            if planned.worker in alive:
                where = f", in the middle of step {planned.step + 1}"
                yield from self.take(planned.worker, notice=planned.action.notice, where=where)
            else:
                yield from self._plan_or_take(replace(planned.action, step=None), shown())
        yield from self._take_those_without_room(recorded, alive, shown)

    def _reached(self, planned: _MidStep) -> bool:
        """Return whether the worker has done half of its forwards and backwards of the step, or is past the step."""
        return self._begun.get(planned.worker, (-1, 0)) > (planned.step, planned.after)

    def _take_those_without_room(
        self, recorded: float, alive: Collection[WorkerId], shown: Callable[[], Status]
    ) -> Iterator[Strike]:
        """Yield strikes on random ready workers until the others fit on the recorded nodes or none is ready."""
        room = room_at(self._schedule, recorded)
        while room is not None and (self.room(recorded, alive) or 0) < 0:
            pick = random.Random(f"{self._schedule.seed}:room:{len(self._taken)}").random()
            worker = victim(Preemption(pick=pick), shown(), self._taken)
            if worker is None:
                return
            yield from self.take(worker, notice=room.notice)

    def _plan_or_take(self, action: Preemption, shown: Status) -> Iterator[Strike | None]:
        worker = victim(action, shown, self._taken | {planned.worker for planned in self._mid_step})
        if worker is None:
            yield None
            return
        owns = any(worker == owner for row in shown.grid for owner, _ in row)
        if action.step is None or not owns:
            yield from self.take(worker, notice=action.notice)
        else:
            half = self._microbatches // len(shown.grid)  # of a cell's forwards and backwards
            self._mid_step.append(_MidStep(worker=worker, action=action, step=action.step, after=half))
