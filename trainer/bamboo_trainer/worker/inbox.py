"""Where the worker's main thread hears of what other threads have for it."""

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from bamboo_core.control.protocol import CommitCheckpoint, NoticeReceived, ToWorker
from bamboo_trainer.memory.host_copies import Copied
from bamboo_trainer.transport.base import Event


@dataclass(frozen=True, slots=True)
class HistoryWritten:
    """The history of the steps before that checkpoint is written, so that the checkpoint may be committed."""

    request: CommitCheckpoint


Item = Event | Copied | ToWorker | NoticeReceived | HistoryWritten


class Inbox:
    """The one place where a worker blocks: what other threads say, in order of arrival."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()  # a signal handler may add while the main thread takes

    def put(self, item: Item) -> None:
        self._items.put(item)

    def take(self, seconds: float) -> list[Item]:
        """All that is there; waits for something for at most that long."""
        items = []
        if seconds > 0:
            try:
                items.append(self._items.get(timeout=seconds))
            except Empty:
                return items
        while not self._items.empty():  # nobody else takes
            items.append(self._items.get_nowait())
        return items
