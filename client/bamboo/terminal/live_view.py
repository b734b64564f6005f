"""The picture of a job on a terminal, drawn again and again, and the keyboard."""

import asyncio
import contextlib
import math
import os
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bamboo.terminal.keys import Keys
from bamboo.terminal.picture import SHOWN_EVENTS, Footer, live
from bamboo.terminal.snapshot import JobEvent, JobSnapshot
from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.view.job_view import view_of_run

LIVE_SECONDS = 0.2


class LivePicture:
    """A picture that changes; the last one stays. footer: returns what stands below it. on_key: called with each key.
    letters: workers have a letter each.
    """

    def __init__(
        self, console: Console, footer: Callable[[], Footer], on_key: Callable[[str], None], *, letters: bool = False
    ) -> None:
        self._console, self._footer, self._letters = console, footer, letters
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._keyboard = Keyboard(on_key)

    def open(self, waiting: str) -> None:
        """waiting: what is shown until there is a job to draw."""
        self._keyboard.open()
        self._live.start()
        self._live.update(Text(waiting, style="dim"), refresh=True)

    def draw(self, snapshot: JobSnapshot | None) -> None:
        if snapshot is not None:
            size, now = self._console.size, datetime.now(UTC)
            picture = live(snapshot, now, size.width, size.height - 1, self._footer(), keys=self._letters)
            self._live.update(picture, refresh=True)

    def close(self, snapshot: JobSnapshot | None) -> None:
        self._keyboard.close()
        self.draw(snapshot)
        self._live.stop()


class LiveView:
    """Shows the picture of a run, and turns keys into wishes."""

    def __init__(
        self,
        spec: JobSpec,
        console: Console,
        *,
        disturb: bool = True,
        page: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """disturb: keys may take workers away. page: the URL of the job page, if there is one."""
        self._spec, self._page, self._clock = spec, page, clock
        self._events: deque[JobEvent] = deque(maxlen=SHOWN_EVENTS)
        self._began = datetime.now(UTC)
        self._drawn = -math.inf
        self._status: Status | None = None
        self._keys: Keys | None = Keys(disturb=disturb)  # none once the job is over
        self._request: Callable[[UserRequest], None] = lambda request: None
        self._picture = LivePicture(console, self._footer, self._key, letters=True)

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._request = request
        self._began = datetime.now(UTC)
        self._picture.open(f"{self._spec.name}: starting workers")

    def status(self, status: Status) -> None:
        self._status = status
        if self._clock() - self._drawn >= LIVE_SECONDS:
            self._draw()

    def emit(self, emit: Emit) -> None:
        if not emit.final:  # the summary says that
            now = datetime.now(UTC)
            self._events.append(JobEvent(at=now, reason=emit.reason, message=emit.message, warning=emit.warning))

    def stop(self) -> None:
        self._keys, self._page = None, ""
        self._picture.close(self._snapshot())

    def _draw(self) -> None:
        self._drawn = self._clock()
        self._picture.draw(self._snapshot())

    def _snapshot(self) -> JobSnapshot | None:
        if self._status is None:
            return None
        return run_snapshot(self._spec, self._status, tuple(self._events), self._began)

    def _footer(self) -> Footer:
        if self._keys is None:
            return Footer(page=self._page)
        return Footer(question=self._keys.question(self._clock()), hints=self._keys.hints(), page=self._page)

    def _key(self, key: str) -> None:
        if self._status is None or self._keys is None:
            return
        self._keys, request = self._keys.press(key, self._status, self._clock())
        if request is not None:
            self._request(request)
        self._draw()


def run_snapshot(spec: JobSpec, status: Status, events: tuple[JobEvent, ...], began: datetime) -> JobSnapshot:
    """A run on this machine as a job with its events. began: when it was started."""
    view = view_of_run(spec, status, datetime.now(UTC), began)
    return JobSnapshot(job=view, events=events)


class Keyboard:
    """Single keys from the terminal into the running loop; the terminal gets its settings back on close()."""

    def __init__(self, on_key: Callable[[str], None]) -> None:
        self._on_key = on_key
        self._saved: list[int | list[bytes | int]] | None = None

    def open(self) -> None:
        if not sys.stdin.isatty():
            return
        self._saved = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        asyncio.get_running_loop().add_reader(sys.stdin, self._read)

    def close(self) -> None:
        if self._saved is None:
            return
        asyncio.get_running_loop().remove_reader(sys.stdin)
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._saved)  # not later: one that is stopped shows no more
        self._saved = None

    def _read(self) -> None:
        try:
            keys = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
        except OSError:  # the terminal has gone
            keys = ""
        if not keys:
            asyncio.get_running_loop().remove_reader(sys.stdin)
        for key in keys:
            self._on_key(key)
