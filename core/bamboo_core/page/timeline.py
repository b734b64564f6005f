"""A job's timeline for its page: curves, marks and events, limited in number. The operator or the CLI records it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from bamboo_core.coordinator.events import Emit, Takeover

MOST_POINTS = 400
MOST_EVENTS = 100
MOST_MARKS = 200
Clock = Callable[[], float]


def steady_clock() -> Clock:
    """Return a clock in Unix seconds that never jumps: the difference of two readings is the time between them."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class StepFigures(NamedTuple):
    """The loss, gradient norm and learning rate of a step or of a curve's point; None if unknown."""

    loss: float | None
    gradient_norm: float | None = None  # global, before clipping
    learning_rate: float | None = None


class Point(NamedTuple):
    """A point of a job's curves, for one or more steps. at: Unix seconds when the last of them was recorded."""

    step: int  # the number of committed steps
    at: float
    # of the steps since the point before: the means of loss and gradient norm; the last step's learning rate
    figures: StepFigures


class Curves:
    """The figures of a job's steps over time, in at most `most` points (an even number).

    Whenever there are `most` points, neighbours are merged in pairs, and from then on each point stands for twice as
    many steps: the whole job stays visible in bounded memory.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._every = most, 1
        self._points: list[Point] = []
        self._open: list[Point] = []  # the newest steps, fewer than a point stands for

    def add(self, step: int, at: float, figures: StepFigures) -> None:
        self._open.append(Point(step, at, figures))
        if len(self._open) < self._every:
            return
        self._points.append(_joined(self._open))
        self._open = []
        if len(self._points) >= self._most:
            self._points = [_joined(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._every *= 2

    def points(self) -> tuple[Point, ...]:
        """Return the points, oldest first; the last one includes the newest step."""
        return (*self._points, *([_joined(self._open)] if self._open else []))


def _joined(points: Sequence[Point]) -> Point:
    figures = StepFigures(
        _mean([point.figures.loss for point in points]),
        _mean([point.figures.gradient_norm for point in points]),
        points[-1].figures.learning_rate,
    )
    return Point(points[-1].step, points[-1].at, figures)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class TimelineKind(StrEnum):
    """The kinds of marks on the timeline."""

    NOTICE = "notice"
    LOSS = "loss"
    TAKEOVER = "takeover"
    RESTORE = "restore"


# by the reason of an Emit
MARKED = {
    "NoticeReceived": TimelineKind.NOTICE,
    "WorkerLost": TimelineKind.LOSS,
    "Restored": TimelineKind.RESTORE,
}


@dataclass(frozen=True, slots=True)
class TimelineMark:
    """A mark on the timeline: a notice, loss, takeover or restore of the job. at: Unix seconds."""

    at: float
    kind: TimelineKind
    message: str
    takeover: Takeover | None = None  # if its kind is TAKEOVER


class JobTimeline:
    """The curves, the newest marks and the newest events of one job since this process began to run it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.now: Clock = clock or steady_clock()
        self.since = self.now()
        self.curves = Curves()
        self.events: deque[tuple[float, Emit]] = deque(maxlen=MOST_EVENTS)
        self.marks: deque[TimelineMark] = deque(maxlen=MOST_MARKS)
        self._step: int | None = None
        self._takeovers = 0

    def follow(self, step: int, figures: StepFigures, takeovers: Sequence[Takeover]) -> None:
        """Record new takeovers and, if steps were committed since the last call, the newest step's figures. step: the
        number of committed steps; it falls when the job goes back to a checkpoint. takeovers: all so far, in order.
        """
        if step != self._step:
            if self._step is not None and step > self._step:
                self.curves.add(step, self.now(), figures)
            self._step = step
        for takeover in takeovers[self._takeovers :]:
            self.marks.append(TimelineMark(self.now(), TimelineKind.TAKEOVER, "", takeover))
        self._takeovers = len(takeovers)

    def add_event(self, emit: Emit) -> None:
        """Record an event for the user, and a mark on the timeline if the event's reason is in MARKED."""
        at = self.now()
        self.events.append((at, emit))
        if (kind := MARKED.get(emit.reason)) is not None:
            self.marks.append(TimelineMark(at, kind, emit.message))
