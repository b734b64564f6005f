"""Marks behind what a device has been given to do: afterwards they say when it got there, and nobody waits for them."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


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
    """Tells of events of a GPU when they are passed, in the order in which they are added, by a thread of its own."""

    def __init__(self, name: str, told: Callable[[], None]) -> None:
        self._told = told
        self._events: queue.SimpleQueue[torch.cuda.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, event: torch.cuda.Event) -> None:
        self._events.put(event)

    def _run(self) -> None:
        while True:
            self._events.get().synchronize()
            self._told()


class EventMarks:
    """The marks of the stream on which a GPU computes. told: called when one is passed of which that is wished, by a
    thread of its own.
    """

    def __init__(self, device: torch.device, told: Callable[[], None]) -> None:
        self._device, self._told = device, told
        self._watch: EventWatch | None = None

    def add(self, *, tells: bool) -> EventMark:
        """A mark behind what was given to the device so far. tells: that it is passed."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        if tells:
            self._watch = self._watch or EventWatch("device-marks", self._told)
            self._watch.add(event)
        return EventMark(event)
