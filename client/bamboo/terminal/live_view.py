"""The picture of a job on a terminal, drawn repeatedly."""

import math
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bamboo.terminal.picture import SHOWN_EVENTS, live
from bamboo.terminal.snapshot import JobEvent, JobSnapshot
from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.view.job_view import view_of_run

LIVE_SECONDS = 0.2


class LivePicture:
    """A changing picture on a terminal; the last one stays on the screen."""

    def __init__(self, console: Console, page: str = "") -> None:
        """Create the picture. page: the URL of the job page, shown while the job runs."""
        self._console, self._page = console, page
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def open(self, waiting: str) -> None:
        """Begin to show the picture. waiting: the text to show until there is a job to draw."""
        self._live.start()
        self._live.update(Text(waiting, style="dim"), refresh=True)

    def draw(self, snapshot: JobSnapshot | None) -> None:
        if snapshot is not None:
            size, now = self._console.size, datetime.now(UTC)
            self._live.update(live(snapshot, now, size.width, size.height - 1, self._page), refresh=True)

    def close(self, snapshot: JobSnapshot | None) -> None:
        self._page = ""
        self.draw(snapshot)
        self._live.stop()


class LiveView:
    """A view that shows a run on this machine as a picture."""

    def __init__(
        self, spec: JobSpec, console: Console, page: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the view. page: the URL of the job page, "" if there is none."""
        self._spec, self._clock = spec, clock
        self._events: deque[JobEvent] = deque(maxlen=SHOWN_EVENTS)
        self._began = datetime.now(UTC)
        self._drawn = -math.inf
        self._status: Status | None = None
        self._picture = LivePicture(console, page)

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._began = datetime.now(UTC)
        self._picture.open(f"{self._spec.name}: starting workers")

    def status(self, status: Status) -> None:
        self._status = status
        if self._clock() - self._drawn >= LIVE_SECONDS:
            self._drawn = self._clock()
            self._picture.draw(self._snapshot())

    def emit(self, emit: Emit) -> None:
        if not emit.final:  # the summary has it
            now = datetime.now(UTC)
            self._events.append(JobEvent(at=now, reason=emit.reason, message=emit.message, warning=emit.warning))

    def stop(self) -> None:
        self._picture.close(self._snapshot())

    def _snapshot(self) -> JobSnapshot | None:
        if self._status is None:
            return None
        return run_snapshot(self._spec, self._status, tuple(self._events), self._began)


def run_snapshot(spec: JobSpec, status: Status, events: tuple[JobEvent, ...], began: datetime) -> JobSnapshot:
    """Return a run on this machine as a job with its events. began: when it was started."""
    view = view_of_run(spec, status, datetime.now(UTC), began)
    return JobSnapshot(job=view, events=events)
