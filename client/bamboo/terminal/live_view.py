"""The live view of a job, local or on a cluster: a picture that is redrawn on a terminal, or lines for pipes."""

import math
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bamboo.terminal import phrases
from bamboo.terminal.picture import SHOWN_EVENTS, events, live
from bamboo.terminal.snapshot import JobEvent, JobSnapshot, UnseenEvents
from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.view.job_view import view_of_run

LIVE_SECONDS = 0.2
LINE_SECONDS = 2.0


class Screen(Protocol):
    """The output of a live view of a job: a picture or lines."""

    def open(self, waiting: str) -> None:
        """Start the output, and show the text `waiting` until the first snapshot."""

    def show(self, snapshot: JobSnapshot) -> None: ...
    def close(self) -> None: ...


class PictureScreen:
    """A screen with a picture that is redrawn at most every LIVE_SECONDS; the last picture stays.

    page: the URL of the job page, shown while the job runs.
    """

    def __init__(self, console: Console, page: str = "") -> None:
        self._console, self._page = console, page
        self._snapshot: JobSnapshot | None = None
        self._drawn = -math.inf  # on time.monotonic()
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def open(self, waiting: str) -> None:
        self._live.start()
        self._live.update(Text(waiting, style="dim"), refresh=True)

    def show(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        if time.monotonic() - self._drawn < LIVE_SECONDS:
            return
        self._drawn = time.monotonic()
        size, now = self._console.size, datetime.now(UTC)
        self._live.update(live(snapshot, now, size.width, size.height - 1, self._page), refresh=True)

    def close(self) -> None:
        self._page, self._drawn = "", -math.inf
        if self._snapshot is not None:
            self.show(self._snapshot)
        self._live.stop()


class LineScreen:
    """A screen of timestamped lines: each event, each change of state, and progress at most every LINE_SECONDS."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._unseen = say, clock, UnseenEvents()
        self._shown, self._state, self._progress = -math.inf, "", ""

    def open(self, waiting: str) -> None:
        self._say(waiting)

    def show(self, snapshot: JobSnapshot) -> None:
        job, now = snapshot.job, datetime.now(UTC)
        for line in events(self._unseen.of(snapshot.events), now, job, times=True):
            self._say(str(line))
        state, progress = job.state.name, phrases.progress(job)
        changed, due = state != self._state, self._clock() - self._shown >= LINE_SECONDS
        if changed or (due and progress != self._progress):
            self._shown = self._shown if changed else self._clock()
            self._state, self._progress = state, progress
            self._say(f"{now:%Y-%m-%dT%H:%M:%SZ} {state}, {progress}")

    def close(self) -> None:
        pass


class LiveView:
    """A RunView that shows a local run on a screen: its newest status and its newest events."""

    def __init__(self, spec: JobSpec, screen: Screen) -> None:
        self._spec, self._screen = spec, screen
        self._events: deque[JobEvent] = deque(maxlen=SHOWN_EVENTS)
        self._number = 0  # of the newest event
        self._began = datetime.now(UTC)
        self._status: Status | None = None

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._began = datetime.now(UTC)
        self._screen.open(f"{self._spec.name}: starting workers")

    def status(self, status: Status) -> None:
        self._status = status
        self._show()

    def emit(self, emit: Emit) -> None:
        if not emit.final:  # the summary has it
            self._number += 1
            event = JobEvent(
                at=datetime.now(UTC),
                reason=emit.reason,
                message=emit.message,
                warning=emit.warning,
                uid=str(self._number),
            )
            self._events.append(event)
            self._show()

    def stop(self) -> None:
        self._show()
        self._screen.close()

    def _show(self) -> None:
        if self._status is not None or self._events:
            self._screen.show(run_snapshot(self._spec, self._status, tuple(self._events), self._began))


def run_snapshot(spec: JobSpec, status: Status | None, events: tuple[JobEvent, ...], began: datetime) -> JobSnapshot:
    """Return a snapshot of a local run. status: None before the first one. began: when the run was started."""
    view = view_of_run(spec, status, datetime.now(UTC), began)
    return JobSnapshot(job=view, events=events)
