"""The queue from which the worker's main thread takes items of other threads."""

import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from bamboo_core.control.protocol import CommitCheckpoint, NoticeReceived, SendPlan, ToWorker
from bamboo_core.planning.plan import Plan
from bamboo_trainer.memory.host_copies import Copied
from bamboo_trainer.transport.base import Event


@dataclass(frozen=True, slots=True)
class HistoryWritten:
    """The history up to that checkpoint is written, so that the checkpoint may be committed."""

    request: CommitCheckpoint


Item = Event | Copied | ToWorker | NoticeReceived | HistoryWritten


class Inbox:
    """The one place where a worker blocks: items of other threads, in order of arrival."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()  # a signal handler may add while the main thread takes
        self._arrivals: dict[int, float] = {}  # of plans that are not obeyed yet, by epoch

    def put(self, item: Item) -> None:
        if isinstance(item, SendPlan):
            self._arrivals[item.plan.epoch] = time.monotonic()
        self._items.put(item)

    def arrival(self, plan: Plan) -> float | None:
        """Return when a plan arrived, in seconds of time.monotonic(): it may have waited for an instruction to end.
        None if a message with the same plan was asked about before.
        """
        return self._arrivals.pop(plan.epoch, None)

    def take(self, seconds: float) -> list[Item]:
        """Return all items, waiting for the first one for at most that long."""
        items = []
        if seconds > 0:
            try:
                items.append(self._items.get(timeout=seconds))
            except Empty:
                return items
        while not self._items.empty():  # only this thread takes
            items.append(self._items.get_nowait())
        return items
