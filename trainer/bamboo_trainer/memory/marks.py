"""Marks behind what a device has been given to do: afterwards they say when it got there, and nobody waits for them."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import finalize

import torch

END_SECONDS: Final = 5.0  # for what was given to a GPU before the process ends


class QueueMark(Protocol):
    """A point in what a device is given to do."""

    def done(self) -> bool:
        """Whether the device has got there."""
        ...

    def since(self, earlier: Any) -> float:
        """The seconds from an earlier mark of the same device to this one. Both are done."""
        ...


@dataclass(frozen=True, slots=True)
class PassedMark:
    """A mark behind what was waited for. at: when it was made, seconds."""

    at: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return True

    def since(self, earlier: "PassedMark") -> float:
        return self.at - earlier.at


@dataclass(frozen=True, slots=True)
class EventMark:
    """A mark of a GPU."""

    event: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def since(self, earlier: "EventMark") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


class EventWatch:
    """Tells of events of a GPU when they are passed, in the order in which they are added, by a thread of its own.

    That ends with the watch. The end of the process waits for it: a thread that is in torch then would abort.
    """

    def __init__(self, name: str, told: Callable[[], None]) -> None:
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        ended = threading.Event()
        thread = threading.Thread(target=_tell, args=(self._events, told, ended), name=name, daemon=True)
        finalize(thread, ended.wait, END_SECONDS)  # at the end of the process what is registered last is called first
        finalize(self, self._events.put, None)
        thread.start()

    def add(self, event: torch.cuda.Event) -> None:
        self._events.put(event)


def _tell(
    events: "queue.SimpleQueue[torch.cuda.Event | None]", told: Callable[[], None], ended: threading.Event
) -> None:
    try:
        while (event := events.get()) is not None:
            event.synchronize()
            told()
    finally:
        ended.set()


def event_mark(device: torch.device) -> EventMark:
    """Return a mark behind what was given to the device so far, on the stream on which it computes."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return EventMark(event)
