"""Where the worker's main thread hears of what other threads have for it."""

import threading
from collections import deque
from dataclasses import dataclass

from bamboo.control.protocol import CommitCheckpoint, NoticeReceived, ToWorker
from bamboo_trainer.transport.base import Event


@dataclass(frozen=True, slots=True)
class HistoryWritten:
    """Of the steps before that checkpoint, so that it may be committed."""

    request: CommitCheckpoint


Item = Event | ToWorker | NoticeReceived | HistoryWritten


class Inbox:
    """The one place where a worker blocks: what other threads say, in order of arrival."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._news = threading.Condition()

    def put(self, item: Item) -> None:
        with self._news:
            self._items.append(item)
            self._news.notify()

    def take(self, seconds: float) -> list[Item]:
        """All that is there; waits for something for at most that long."""
        with self._news:
            if not self._items and seconds > 0:
                self._news.wait(seconds)
            items = []
            while self._items:  # one by one: the signal handler may add while we take
                items.append(self._items.popleft())
            return items
