"""The picture of a job on a terminal: progress, the grid of pipelines and stages, the latest events. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bamboo.terminal.checkpoint_line import of_run
from bamboo.terminal.keys import letter
from bamboo_core.coordinator.events import Emit, Status, WorkerState
from bamboo_core.job.budget_reach import date_told, seconds_late
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import count, duration

BARS = "▁▂▃▄▅▆▇█"
LEAST_WIDTH = 10  # of the bar and of the curve, whatever stands beside them
NEAR = 2  # losses on both sides, of which the median says where the curve is, whatever a single one does
FAR = 4  # so many times the range of the medians away from them, a loss is beyond the curve's scale
SHOWN_EVENTS = 6
SHOWN_METRICS = 3
STYLES = {
    WorkerState.STARTING: "dim",
    WorkerState.STANDBY: "cyan",
    WorkerState.SYNCING: "yellow",
    WorkerState.TRAINING: "green",
    WorkerState.LEAVING: "magenta",
}
STATES = {
    WorkerState.STARTING: "starting",
    WorkerState.STANDBY: "standby",
    WorkerState.SYNCING: "receiving state",
    WorkerState.TRAINING: "training",
    WorkerState.LEAVING: "leaving",
}
PHASES = {
    "Pending": "waiting for workers",
    "Running": "training",
    "Restoring": "going back to a checkpoint",
    "Saving": "writing the weights",
    "Over": "over",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The lines below the picture."""

    question: str = ""  # what a key has asked and is not answered
    hints: tuple[str, ...] = ()  # what keys do
    page: str = ""  # its URL


def render(
    job: str,
    status: Status,
    events: Sequence[tuple[float, Emit]],
    *,
    elapsed: float,
    now: datetime,
    footer: Footer,
    width: int,
) -> RenderableType:
    """The whole picture; elapsed, and the time that comes with each event, in seconds since the start. width: of the
    terminal, in columns.
    """
    phase = PHASES.get(status.phase, status.phase)
    parts: list[RenderableType] = [
        Text.assemble((job, "bold"), f"  {phase}", (_losses(status), "yellow")),
        _progress(status, elapsed, width),
    ]
    if status.losses:
        parts.append(_course(status, width))
    if status.checkpoint is not None:
        parts.append(Text(of_run(status.checkpoint), no_wrap=True, overflow="ellipsis"))
    if status.done_by is not None:
        late = (seconds_late(status.done_by, now, status.eta_seconds) or 0.0) > 0
        parts.append(Text(date_told(status.done_by, now, status.eta_seconds), style="yellow" if late else ""))
    if status.grid_choice:
        parts.append(Text(f"grid: {status.grid_choice}", style="dim"))
    if status.grid:
        parts.append(_Grid(status))
    if others := [(w, state) for w, state in status.workers if state is not WorkerState.TRAINING]:
        parts.append(Text("other workers: ").append(Text("   ").join(_worker(w, state) for w, state in others)))
    if events:
        parts.append(_events(events[-SHOWN_EVENTS:]))
    if footer.question:
        parts.append(Text(footer.question, style="bold reverse"))
    else:
        parts += [Text(hint, style="dim") for hint in footer.hints]
    if footer.page:
        parts.append(Text(f"page: {footer.page}", style="dim", no_wrap=True, overflow="fold"))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of the values in at most `width` bars, each the mean of its share. A value that is far from all near
    it does not count for the scale.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    number = min(width, len(finite))
    bounds = [len(finite) * i // number for i in range(number + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    near = [means[0], *(median(means[max(0, i - NEAR) : i + NEAR + 1]) for i in range(1, number - 1)), means[-1]]
    far = FAR * ((max(near) - min(near)) or abs(max(near)))
    spanned = [mean for mean in means if min(near) - far <= mean <= max(near) + far]
    low, high = min(spanned), max(spanned)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((min(max(mean, low), high) - low) * scale)] for mean in means)


def _losses(status: Status) -> str:
    """How often the job was disturbed; "" if it was not."""
    if not status.preemptions:
        return ""
    return f"  {count(status.preemptions, 'preemption')}, {count(len(status.takeovers), 'takeover')}"


def _progress(status: Status, elapsed: float, width: int) -> Text:
    """The bar, as long as the terminal has room for beside the words."""
    left = "" if status.eta_seconds is None or status.phase == "Over" else f", ETA {duration(status.eta_seconds)}"
    early = ", stopped early" if status.stopped_early else ""
    words = f"  step {status.step}/{status.steps or '?'}{early}  {duration(elapsed)}{left}"
    room = max(LEAST_WIDTH, width - len(words))
    done = room * min(status.step, status.steps) // status.steps if status.steps else 0
    return Text.assemble(("█" * done, "green"), ("░" * (room - done), "dim"), words)


def _course(status: Status, width: int) -> Text:
    words = f" {status.losses[-1]:.4f}"
    if status.samples_per_second is not None:
        words += f"  {status.samples_per_second:.1f} samples/s"
    for name, value in status.metrics[:SHOWN_METRICS]:
        words += f"  {name} {'-' if value is None else f'{value:.4g}'}"
    room = max(LEAST_WIDTH, width - len("loss ") - cell_len(words))
    return Text.assemble("loss ", (sparkline(status.losses, room), "cyan"), words)


def _events(events: Sequence[tuple[float, Emit]]) -> Table:
    """The time, and the sentence beside it, in as many lines as it takes."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for at, emit in events:
        table.add_row(duration(at), Text(emit.message or emit.reason, style="yellow" if emit.warning else ""))
    return table


class _Grid:
    """A row for each pipeline; where the stages do not fit beside each other, below each other."""

    def __init__(self, status: Status) -> None:
        states, slow = dict(status.workers), {one.worker for one in status.slow}
        self._rows = [[_cell(w, protected, states, slow=w in slow) for w, protected in row] for row in status.grid]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._tables(options.max_width)

    def _tables(self, width: int) -> Iterator[Table]:
        cell = max(max(text.cell_len for row in self._rows for text in row), len("stage 00"))
        stages = len(self._rows[0])
        each = max(1, (width - len("pipeline")) // (cell + 3))  # a column has a rule and a space on both sides
        for first in range(0, stages, each):
            shown = range(first, min(first + each, stages))
            table = Table(show_edge=False, pad_edge=False)
            table.add_column("pipeline", justify="right", no_wrap=True)
            for stage in shown:
                table.add_column(f"stage {stage}", min_width=min(cell, width // 2) if stages > each else None)
            for pipeline, row in enumerate(self._rows):
                table.add_row(str(pipeline), *(row[stage] for stage in shown))
            yield table


def _cell(worker: WorkerId, protected: bool, states: dict[WorkerId, WorkerState], *, slow: bool) -> Text:
    text = _worker(worker, states.get(worker), usual=WorkerState.TRAINING)
    text = text.append(" slow", "yellow") if slow else text
    return text if protected else text.append(" unprotected", "yellow")


def _worker(worker: WorkerId, state: WorkerState | None, usual: WorkerState | None = None) -> Text:
    """The worker's key, name and state; without the state if that is the usual one."""
    style = STYLES[state] if state else "red"
    said = "" if state is usual else f" {STATES[state] if state else 'lost'}"
    return Text.assemble((letter(worker), f"{style} bold underline"), (f" {worker}{said}", style))
