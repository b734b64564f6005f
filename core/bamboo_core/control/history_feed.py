"""What a shell tells the root for the job's history: all events, until they are known to be in it."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from bamboo_core.control.channel_events import Received, WorkerJoined
from bamboo_core.control.protocol import MOST_TEXT, HistoryEvent, HistoryEvents, HistoryKept
from bamboo_core.planning.plan import ROOT, Plan, WorkerId

MOST_WAITING: Final = 1000  # events; the oldest are given up
AT_ONCE: Final = 50


class Told(Protocol):
    """What a coordinator or its shell tells the user, such as an `Emit`."""

    @property
    def reason(self) -> str: ...

    @property
    def message(self) -> str: ...

    @property
    def warning(self) -> bool: ...


class HistoryFeed:
    """The events of a job that its root is to write into the history. source: nobody else's; it names the events
    together with their numbers. clock: seconds since 1970.
    """

    def __init__(self, source: str, clock: Callable[[], float]) -> None:
        self._source, self._clock = source, clock
        self._waiting: deque[HistoryEvent] = deque(maxlen=MOST_WAITING)
        self._number = 0
        self._root: WorkerId | None = None
        self._sent = 0  # to that root

    def follow(self, event: object, told: Iterable[Told], plan: Plan | None) -> tuple[WorkerId, HistoryEvents] | None:
        """The events that are to be sent after a turn of the coordinator, and the worker that gets them; None if
        nothing is due. They go out before anything that the turn commands: a root that is told to stop has to know what
        to write.

        event: what was taken in. told: what the turn tells the user. plan: now in force; None if no history is kept.
        """
        for one in told:
            self.add(one)
        self._heard(event)
        return self._owed(plan)

    def add(self, told: Told) -> None:
        self._number += 1
        event = HistoryEvent(
            number=self._number,
            time=self._clock(),
            reason=told.reason,
            message=told.message[:MOST_TEXT],
            warning=told.warning,
        )
        self._waiting.append(event)

    def _heard(self, event: object) -> None:
        """A worker that comes back is told again, and what the root has written need not be kept."""
        if isinstance(event, WorkerJoined):
            self.rejoined(event.hello.worker)
        elif isinstance(event, Received) and isinstance(event.message, HistoryKept):
            self.kept(event.message)

    def _owed(self, plan: Plan | None) -> tuple[WorkerId, HistoryEvents] | None:
        """The events that the root's owner has not been sent yet, and who that is; None without a plan or without such
        events.
        """
        if plan is None:
            return None
        root = plan.at(ROOT).owner
        events = self.due(root)
        return (root, events) if events else None

    def due(self, root: WorkerId | None) -> HistoryEvents | None:
        """What that root has not been told. To one that is new, or whose channel was cut, all is told once more."""
        if root != self._root:
            self._root, self._sent = root, 0
        if root is None or self._sent == self._number:
            return None
        events = tuple(event for event in self._waiting if event.number > self._sent)[:AT_ONCE]
        if not events:
            return None
        self._sent = events[-1].number
        return HistoryEvents(source=self._source, events=events)

    def rejoined(self, worker: WorkerId) -> None:
        """What was sent to it may be lost."""
        if worker == self._root:
            self._root = None

    def kept(self, said: HistoryKept) -> None:
        if said.source == self._source:
            while self._waiting and self._waiting[0].number <= said.number:
                self._waiting.popleft()

    def rest(self) -> HistoryEvents:
        """What is not known to be in the history."""
        return HistoryEvents(source=self._source, events=tuple(self._waiting))
