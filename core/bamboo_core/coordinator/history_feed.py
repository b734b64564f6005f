"""The history feed: the newest unconfirmed events of a job, which a shell sends to the root for the job's history."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from bamboo_core.control.protocol import MOST_TEXT, HistoryEvent, HistoryEvents, HistoryKept, Received, WorkerJoined
from bamboo_core.coordinator.events import Emit
from bamboo_core.planning.plan import ROOT, Plan, WorkerId

MOST_WAITING: Final = 1000  # events; older ones are dropped
AT_ONCE: Final = 50


class HistoryFeed:
    """A queue of the job's newest events that its root should write into the history. source: a unique name, which
    identifies an event together with its number. clock: returns the seconds since 1970.
    """

    def __init__(self, source: str, clock: Callable[[], float]) -> None:
        self._source, self._clock = source, clock
        self._waiting: deque[HistoryEvent] = deque(maxlen=MOST_WAITING)
        self._number = 0
        self._root: WorkerId | None = None
        self._sent = 0  # to that root

    def follow(self, event: object, emits: Iterable[Emit], plan: Plan | None) -> tuple[WorkerId, HistoryEvents] | None:
        """Queue the messages of a `coordinator.step`. Return the root and the events to send to it now; else None.

        The shell sends these events, at most AT_ONCE, before the call's other commands, so that they reach the root
        before a Stop. A new root, or one that reconnects, gets all queued events, over several calls. event, emits: the
        call's event and messages to users. plan: the newest plan; None if there is no plan, or no history is kept.
        """
        for one in emits:
            self.add(one)
        if isinstance(event, Received) and isinstance(event.message, HistoryKept):
            self._kept(event.message)
        root = plan.at(ROOT).owner if plan is not None else None
        if root != self._root or (isinstance(event, WorkerJoined) and event.hello.worker == root):
            self._root, self._sent = root, 0
        if root is None or self._sent == self._number:
            return None
        events = tuple(event for event in self._waiting if event.number > self._sent)[:AT_ONCE]
        if not events:
            return None
        self._sent = events[-1].number
        return root, HistoryEvents(source=self._source, events=events)

    def add(self, message: Emit) -> None:
        self._number += 1
        event = HistoryEvent(
            number=self._number,
            time=self._clock(),
            reason=message.reason,
            message=message.message[:MOST_TEXT],
            warning=message.warning,
        )
        self._waiting.append(event)

    def _kept(self, report: HistoryKept) -> None:
        if report.source == self._source:
            while self._waiting and self._waiting[0].number <= report.number:
                self._waiting.popleft()

    def rest(self) -> HistoryEvents:
        """Return all queued events that no root has confirmed as written."""
        return HistoryEvents(source=self._source, events=tuple(self._waiting))
