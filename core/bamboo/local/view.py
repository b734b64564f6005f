"""What a person sees while a job runs: nothing, lines, or a live grid of pipelines and stages with keys."""

import asyncio
import math
import os
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bamboo.events import Emit, Status, WorkerState
from bamboo.plan import WorkerId

LETTERS = "abcdefghijklmnoprstuvwxyz"  # without q, which stops
BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 2.0
LIVE_SECONDS = 0.2
SHOWN_EVENTS = 6
QUIT_KEY = "q stops"
ALL_KEYS = f"a letter kills that worker, its capital letter gives it a notice, {QUIT_KEY}"
STYLES = {
    WorkerState.STARTING: "dim",
    WorkerState.STANDBY: "cyan",
    WorkerState.SYNCING: "yellow",
    WorkerState.TRAINING: "green",
    WorkerState.LEAVING: "magenta",
}


@dataclass(frozen=True, slots=True)
class Take:
    """The user wants that worker taken away."""

    worker: WorkerId
    notice: bool


@dataclass(frozen=True, slots=True)
class Quit:
    """The user wants the job stopped."""


Wish = Take | Quit


class View(Protocol):
    def start(self, wish: Callable[[Wish], None]) -> None: ...
    def status(self, status: Status) -> None: ...
    def emit(self, emit: Emit) -> None: ...
    def stop(self) -> None: ...


class QuietView:
    """Shows nothing."""

    def start(self, wish: Callable[[Wish], None]) -> None:
        pass

    def status(self, status: Status) -> None:
        pass

    def emit(self, emit: Emit) -> None:
        pass

    def stop(self) -> None:
        pass


class Views:
    """Several views at once."""

    def __init__(self, *views: View) -> None:
        self._views = views

    def start(self, wish: Callable[[Wish], None]) -> None:
        for view in self._views:
            view.start(wish)

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

    How the job ended is for the summary to say.
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

    def start(self, wish: Callable[[Wish], None]) -> None:
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


class LiveView:
    """A grid on a terminal. A worker's letter kills it, the capital letter gives it a notice, q stops the job."""

    def __init__(
        self,
        job: str,
        console: Console,
        *,
        keys: str = ALL_KEYS,
        page: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """keys: what the keys do, in words. page: the URL of the job page, if there is one."""
        self._job = job
        self._keys = keys
        self._page = page
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False)
        self._events: deque[tuple[float, Emit]] = deque(maxlen=SHOWN_EVENTS)
        self._began = 0.0
        self._drawn = -math.inf
        self._status: Status | None = None
        self._wish: Callable[[Wish], None] = lambda wish: None
        self._keyboard = Keyboard(self._key)

    def start(self, wish: Callable[[Wish], None]) -> None:
        self._wish = wish
        self._began = self._clock()
        self._keyboard.open()
        self._live.start()
        self._live.update(Text(f"{self._job}: starting workers", style="dim"), refresh=True)

    def status(self, status: Status) -> None:
        self._status = status
        if self._clock() - self._drawn >= LIVE_SECONDS:
            self._draw()

    def emit(self, emit: Emit) -> None:
        if not emit.final:  # NB: the summary says that
            self._events.append((self._clock() - self._began, emit))

    def stop(self) -> None:
        self._keyboard.close()
        self._keys = self._page = ""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn = self._clock()
        if self._status is not None:
            picture = render(self._job, self._status, tuple(self._events), keys=self._keys, page=self._page)
            self._live.update(picture, refresh=True)

    def _key(self, key: str) -> None:
        if key == "q":
            self._wish(Quit())
        elif self._status is not None and (worker := worker_of(key.lower(), self._status)) is not None:
            self._wish(Take(worker, notice=key.isupper()))


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
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)
        self._saved = None

    def _read(self) -> None:
        keys = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
        if not keys:
            asyncio.get_running_loop().remove_reader(sys.stdin)
        for key in keys:
            self._on_key(key)


def letter(worker: WorkerId) -> str:
    """A worker's key, the same as long as it lives."""
    number = int("".join(c for c in worker if c in "0123456789") or "0")
    return LETTERS[number % len(LETTERS)]


def worker_of(key: str, status: Status) -> WorkerId | None:
    return next((worker for worker, _ in status.workers if letter(worker) == key), None)


def progress(status: Status) -> str:
    """One line: step, loss, speed, time left."""
    parts = [f"step {status.step}/{status.steps}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.samples_per_second is not None:
        parts.append(f"{status.samples_per_second:.1f} samples/s")
    if status.eta_seconds is not None:
        parts.append(f"ETA {duration(status.eta_seconds)}")
    if status.preemptions:
        parts.append(f"preemptions {status.preemptions}, takeovers {len(status.takeovers)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """5s, 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The course of the values in at most `width` bars, each the mean of its share."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    count = min(width, len(finite))
    bounds = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def render(
    job: str, status: Status, events: Sequence[tuple[float, Emit]], *, keys: str = ALL_KEYS, page: str = ""
) -> RenderableType:
    """The whole picture; events come with their time in seconds since the start."""
    parts: list[RenderableType] = [
        Text.assemble((job, "bold"), f"  {status.phase}, epoch {status.epoch}  ", (progress(status), "bold green"))
    ]
    if status.grid:
        parts.append(_grid(status))
    if spare := [(w, state) for w, state in status.workers if state is not WorkerState.TRAINING]:
        parts.append(Text("other workers: ").append(Text("   ").join(_worker(w, state) for w, state in spare)))
    if status.losses:
        parts.append(Text.assemble("loss ", (sparkline(status.losses), "cyan"), f" {status.losses[-1]:.4f}"))
    for at, emit in events[-SHOWN_EVENTS:]:
        style = "yellow" if emit.warning else "dim"
        parts.append(Text(f"{at:7.1f}s {emit.reason}: {emit.message}", style=style, no_wrap=True, overflow="ellipsis"))
    if keys:
        parts.append(Text(keys, style="dim italic"))
    if page:
        parts.append(Text(f"page: {page}", style="dim italic", no_wrap=True, overflow="fold"))
    return Group(*parts)


def _grid(status: Status) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("pipeline", justify="right")
    for stage in range(len(status.grid[0])):
        table.add_column(f"stage {stage}")
    states = dict(status.workers)
    for pipeline, row in enumerate(status.grid):
        cells = []
        for worker, protected in row:
            cell = _worker(worker, states.get(worker), usual=WorkerState.TRAINING)
            cells.append(cell if protected else cell.append(" unprotected", "yellow"))
        table.add_row(str(pipeline), *cells)
    return table


def _worker(worker: WorkerId, state: WorkerState | None, usual: WorkerState | None = None) -> Text:
    """Its key, name and state; without the state if that is the usual one."""
    style = STYLES[state] if state else "red"
    said = "" if state is usual else f" {state or 'lost'}"
    return Text.assemble((letter(worker), f"{style} bold underline"), (f" {worker}{said}", style))
