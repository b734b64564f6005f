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
from bamboo.terminal.picture import SHOWN_EVENTS, Footer, render
from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status

LIVE_SECONDS = 0.2


class LiveView:
    """Shows the picture, and turns keys into wishes."""

    def __init__(
        self,
        job: str,
        console: Console,
        *,
        disturb: bool = True,
        page: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """disturb: keys may take workers away. page: the URL of the job page, if there is one."""
        self._job, self._page, self._console, self._clock = job, page, console, clock
        self._live = Live(console=console, auto_refresh=False)
        self._events: deque[tuple[float, Emit]] = deque(maxlen=SHOWN_EVENTS)
        self._began = 0.0
        self._drawn = -math.inf
        self._status: Status | None = None
        self._keys: Keys | None = Keys(disturb=disturb)  # none once the job is over
        self._request: Callable[[UserRequest], None] = lambda request: None
        self._keyboard = Keyboard(self._key)

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._request = request
        self._began = self._clock()
        self._keyboard.open()
        self._live.start()
        self._live.update(Text(f"{self._job}: starting workers", style="dim"), refresh=True)

    def status(self, status: Status) -> None:
        self._status = status
        if self._clock() - self._drawn >= LIVE_SECONDS:
            self._draw()

    def emit(self, emit: Emit) -> None:
        if not emit.final:  # the summary says that
            self._events.append((self._clock() - self._began, emit))

    def stop(self) -> None:
        self._keyboard.close()
        self._keys, self._page = None, ""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        now = self._drawn = self._clock()
        if self._status is None:
            return
        footer = Footer(page=self._page)
        if self._keys is not None:
            footer = Footer(question=self._keys.question(now), hints=self._keys.hints(), page=self._page)
        elapsed = now - self._began
        events, wall = tuple(self._events), datetime.now(UTC)
        width = self._console.width
        picture = render(self._job, self._status, events, elapsed=elapsed, now=wall, footer=footer, width=width)
        self._live.update(picture, refresh=True)

    def _key(self, key: str) -> None:
        if self._status is None or self._keys is None:
            return
        self._keys, request = self._keys.press(key, self._status, self._clock())
        if request is not None:
            self._request(request)
        self._draw()


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
