"""The interface of the views of a local run, and the requests that its user makes through them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True)
class TakeWorker:
    """The user's request to take away a worker and the others of its node, with a preemption notice or at once."""

    worker: WorkerId
    notice: bool


@dataclass(frozen=True, slots=True)
class StopJob:
    """The user's request to stop the job, after a checkpoint if the job keeps any; a second one stops it at once."""


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """The user's request to change the job's spec."""

    spec: JobSpec


UserRequest = TakeWorker | StopJob | ChangeJob


class RunView(Protocol):
    def start(self, request: Callable[[UserRequest], None]) -> None: ...
    def status(self, status: Status) -> None: ...
    def emit(self, emit: Emit) -> None: ...
    def stop(self) -> None: ...


class CombinedView:
    """A RunView that passes every call on to several views, or to none."""

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
