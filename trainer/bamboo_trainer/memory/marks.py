"""Marks behind the work of a device, which later tell when the device got there, without waiting."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import finalize

import torch

END_SECONDS: Final = 5.0  # limit for a GPU's work at the end of the process


class QueueMark(Protocol):
    """A point in a device's queue of work."""

    def done(self) -> bool:
        """Return whether the device has got there."""
        ...

    def since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark of the same device to this one. Both must be done."""
        ...


@dataclass(frozen=True, slots=True)
class PassedMark:
    """A mark behind finished work. at: its time in seconds."""

    at: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return True

    def since(self, earlier: "PassedMark") -> float:
        return self.at - earlier.at


@dataclass(frozen=True, slots=True)
class EventMark:
    """A mark in a GPU's stream."""

    event: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def since(self, earlier: "EventMark") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


class EventWatch:
    """A thread that notifies of passed events of a GPU, in the order in which they were added.

    The thread ends with the watch. The end of the process waits for it, because a thread inside torch would then abort.
    """

    def __init__(self, name: str, notify: Callable[[], None]) -> None:
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        ended = threading.Event()
        thread = threading.Thread(target=_tell, args=(self._events, notify, ended), name=name, daemon=True)
        finalize(thread, ended.wait, END_SECONDS)  # finalizers run last registered, first called
        finalize(self, self._events.put, None)
        thread.start()

    def add(self, event: torch.cuda.Event) -> None:
        self._events.put(event)


def _tell(
    events: "queue.SimpleQueue[torch.cuda.Event | None]", notify: Callable[[], None], ended: threading.Event
) -> None:
    try:
        while (event := events.get()) is not None:
            event.synchronize()
            notify()
    finally:
        ended.set()


def event_mark(device: torch.device) -> EventMark:
    """Return a mark behind the work of the device's computing stream so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return EventMark(event)
