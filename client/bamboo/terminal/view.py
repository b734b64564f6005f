"""What a user sees while a job runs: nothing, lines, or (bamboo.terminal.live_view) a picture."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bamboo.terminal import phrases
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.plan import WorkerId

PLAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class TakeWorker:
    """The user's request to take a worker away."""

    worker: WorkerId
    notice: bool


@dataclass(frozen=True, slots=True)
class StopJob:
    """The user's request to stop the job."""


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """An edit of the job."""

    spec: JobSpec


UserRequest = TakeWorker | StopJob | ChangeJob


class RunView(Protocol):
    def start(self, request: Callable[[UserRequest], None]) -> None: ...
    def status(self, status: Status) -> None: ...
    def emit(self, emit: Emit) -> None: ...
    def stop(self) -> None: ...


class CombinedView:
    """Several views at once; without any, it shows nothing."""

    def __init__(self, *views: RunView) -> None:
        self._views = views

    def start(self, request: Callable[[UserRequest], None]) -> None:
        for view in self._views:
            view.start(request)

    def status(self, status: Status) -> None:
        for view in self._views:
            view.status(status)

    def emit(self, emit: Emit) -> None:
        for view in self._views:
            view.emit(emit)

    def stop(self) -> None:
        for view in self._views:
            view.stop()


class PlainView:
    """Lines for logs and pipes: every event, and the progress at most every two seconds. Each begins with the time.

    The summary tells how the job ended.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        stamp: Callable[[], str] = lambda: time.strftime("%Y-%m-%d %H:%M:%S"),
    ) -> None:
        self._say = write
        self._clock, self._stamp = clock, stamp
        self._shown: tuple[float, int] = (-math.inf, 0)

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._write("starting workers")

    def _write(self, text: str) -> None:
        self._say(f"{self._stamp()} {text}")

    def status(self, status: Status) -> None:
        at, step = self._shown
        if status.step != step and self._clock() - at >= PLAIN_SECONDS:
            self._shown = (self._clock(), status.step)
            self._write(progress(status))

    def emit(self, emit: Emit) -> None:
        if not emit.final:
            self._write(f"{'! ' if emit.warning else ''}{emit.reason}: {emit.message}")

    def stop(self) -> None:
        pass


def progress(status: Status) -> str:
    """Return a line with step, loss, speed and time left."""
    parts = phrases.progress_words(
        status.step,
        status.steps,
        loss=status.loss,
        samples_per_second=status.samples_per_second,
        eta_seconds=status.eta_seconds,
        stopped_early=bool(status.stopped_early),
    )
    if status.preemptions:
        parts.append(f"preemptions {status.preemptions}, takeovers {len(status.takeovers)}")
    return ", ".join(parts)
