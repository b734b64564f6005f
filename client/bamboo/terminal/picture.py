"""The picture of a job, local or on a cluster, for a terminal; legible at 80 columns. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bamboo.terminal import phrases
from bamboo.terminal.snapshot import JobEvent, JobSnapshot, RemoteWorker
from bamboo.terminal.tables import plain_table
from bamboo_core.coordinator.events import WorkerState
from bamboo_core.coordinator.protection import OFF
from bamboo_core.job.status import ReportedCondition
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import wrapped
from bamboo_core.view.job_view import JobView

BARS = "▁▂▃▄▅▆▇█"
LEAST_WIDTH = 10  # columns of the progress bar and of the loss curve, even next to long words
NEAR = 2  # neighbours on each side in the running medians that scale the loss curve
FAR = 4  # a loss farther than this many times the medians' range from them does not stretch the scale
SHOWN_EVENTS = 8
SHOWN_METRICS = 3
GRID_MARGIN = 12  # width of the column with the pipelines' numbers
TONES = {"good": "green", "warn": "yellow", "bad": "bold red", "idle": "cyan"}
STYLES = {
    WorkerState.STARTING: "dim",
    WorkerState.STANDBY: "cyan",
    WorkerState.SYNCING: "yellow",
    WorkerState.TRAINING: "green",
    WorkerState.LEAVING: "magenta",
}
WORKER_STYLES = {  # by decreasing interest
    "leaving": "magenta",
    "pending": "yellow",
    "starting": "cyan",
    "waiting": "cyan",
    "standby": "cyan",
    "training": "green",
    "failed": "red",
    "ended": "dim",
}
HOLD_WHEN_ALL_IS_WELL = ("Accepted", "WorkersReady", "WorkersUpdated", "Running", "Protected")


def jobs(found: Sequence[JobView], now: datetime, *, namespaces: bool = False) -> Table:
    """Return a table with one line per job. namespaces: show their namespaces."""
    heads = [*(["NAMESPACE"] if namespaces else []), "NAME", "STATE"]
    table = plain_table(*heads, ">STEP", ">PIPELINES", ">WORKERS", "PROTECTED", ">PREEMPTIONS", ">AGE")
    for job in found:
        cells: list[str | Text] = [
            *([job.namespace] if namespaces else []),
            job.name,
            _state(job),
            f"{job.step}/{job.steps}",
            f"{job.status.pipelines.ready}/{job.status.pipelines.desired}",
            f"{job.status.workers.ready}/{job.status.workers.desired}",
            phrases.protected(job, now),
            str(job.status.preemptions),
            phrases.age(job.metadata.creation_timestamp, now),
        ]
        table.add_row(*cells)
    return table


def status(snapshot: JobSnapshot, now: datetime, width: int) -> RenderableType:
    """Return the full status of a job: progress, problems, grid, workers, conditions and newest events."""
    job = snapshot.job
    parts: list[RenderableType] = [*head(snapshot, now, width), *grids(job, width)]
    if snapshot.workers:
        parts += ["", workers(snapshot, now, width)]
    if job.status.conditions:
        parts += ["", conditions(job.status.conditions, now)]
    if snapshot.events:
        parts += ["", *events(snapshot.events[-SHOWN_EVENTS:], now, job)]
    return Group(*parts)


def live(snapshot: JobSnapshot, now: datetime, width: int, height: int, page: str = "") -> RenderableType:
    """Return the picture of a running job. Leave out workers and older events to fit it in `height` lines, if possible.

    page: the URL of the job page, shown in the last line.
    """
    top = head(snapshot, now, width)
    last = [Text(f"page: {page}", style="dim", no_wrap=True, overflow="fold")] if page else []
    room = height - sum(len(wrapped(line.plain, width).split("\n")) for line in (*top, *last))
    room -= _lines_of_grids(snapshot.job, width)
    newest = min(SHOWN_EVENTS, len(snapshot.events), max(room // 2, 4))
    listed, used = workers_within(snapshot, now, width, room - newest)
    room = max(0, room - used)
    shown: list[Text] = []
    for line in reversed(events(snapshot.events[-SHOWN_EVENTS:], now, snapshot.job)):
        line = Text(wrapped(line.plain, width), style=line.style)
        room -= line.plain.count("\n") + 1
        if room < 0:
            break
        shown.insert(0, line)
    return Group(*top, *grids(snapshot.job, width), *listed, *shown, *last)


def workers_within(snapshot: JobSnapshot, now: datetime, width: int, lines: int) -> tuple[list[RenderableType], int]:
    """Return a table of the most interesting workers and a count of the rest, and the lines used (at most `lines`)."""
    most = lines - 1 if len(snapshot.workers) < lines else lines - 2
    if not snapshot.workers or most < 1:
        return [], 0
    ranked = sorted(snapshot.workers, key=lambda w: (list(WORKER_STYLES).index(w.state), w.number))
    names = {w.name for w in ranked[:most]}
    kept = replace(snapshot, workers=tuple(w for w in snapshot.workers if w.name in names))
    table, hidden = workers(kept, now, width), len(snapshot.workers) - len(names)
    if not hidden:
        return [table], len(names) + 1
    return [table, Text(f"and {phrases.count(hidden, 'more worker')}", style="dim")], len(names) + 2


def head(snapshot: JobSnapshot, now: datetime, width: int) -> list[Text]:
    """Return lines about the job, its progress and its problems."""
    job, shown, began = snapshot.job, snapshot.job.state, snapshot.job.metadata.creation_timestamp
    place = job.namespace if job.uid else "on this machine"
    epoch = job.live.epoch if job.live is not None else job.status.plan_record.epoch
    about = f"  {place}, epoch {epoch}, {phrases.age(began, now)} old"
    waiting = phrases.why_waiting(job) or ""
    explains = bool(shown.sentence) and (shown.name, shown.tone) != ("Running", "good")  # all is well then
    lines = [
        Text.assemble((job.name, "bold"), "  ", _state(job), (about, "dim")),
        *([Text(shown.sentence, style=TONES[shown.tone])] if explains else []),
        _progress(job, width),
        *([_course(job, width)] if job.live is not None and job.live.losses else []),
        Text(phrases.counts(job)),
    ]
    facts = (
        (phrases.protection(job, now), "yellow" if phrases.protected(job, now) in ("no", "?") else ""),
        (phrases.evaluation(job), ""),
        (phrases.checkpoint(job, now), ""),
        (phrases.date(job, now), "yellow" if phrases.is_late(job, now) else ""),
        (phrases.grid_choice(job), "dim"),
        (phrases.rollout(job), "yellow" if phrases.rollout(job).startswith("rollout stalled") else ""),
        (f"cost {cost}" if (cost := phrases.cost(job)) else "", ""),
        ("" if waiting == shown.sentence else waiting, "yellow"),
        (phrases.stale(job, now), "yellow"),
        *((f"not shown: {what}", "dim") for what in snapshot.missing),
    )
    return lines + [Text(line, style=style) for line, style in facts if line]


def _state(job: JobView) -> Text:
    return Text(job.state.name, style=TONES[job.state.tone])


def _progress(job: JobView, width: int) -> Text:
    """Return the progress bar, as long as the words next to it allow."""
    words = f"  {phrases.progress(job)}"
    room = max(LEAST_WIDTH, width - len(words))
    done = room * min(job.step, job.steps) // job.steps if job.steps else 0
    return Text.assemble(("█" * done, "green"), ("░" * (room - done), "dim"), words)


def _course(job: JobView, width: int) -> Text:
    """Return a line with the curve of the newest losses and the first SHOWN_METRICS metrics of the newest step."""
    assert job.live is not None
    words = "".join(
        f"  {name} {'-' if value is None else f'{value:.4g}'}" for name, value in job.live.metrics[:SHOWN_METRICS]
    )
    room = max(LEAST_WIDTH, width - len("loss ") - cell_len(words))
    return Text.assemble("loss ", (sparkline(job.live.losses, room), "cyan"), words)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a sparkline of at most `width` bars, each the mean of consecutive finite values; "" if there are none.

    Outliers do not change the scale.
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


def grids(job: JobView, width: int) -> list[RenderableType]:
    """Return a table of the workers by pipeline and stage, split into several tables if it exceeds the width.

    In a local run, workers without a stage follow.
    """
    found: list[RenderableType] = []
    rows = _cells(job)
    for first, last in _blocks(rows, width):
        table = Table(show_edge=False, pad_edge=False)
        table.add_column("pipeline", justify="right")
        for stage in range(first, last):
            table.add_column(f"stage {stage}", no_wrap=True)
        for number, row in enumerate(rows):
            table.add_row(str(number), *row[first:last])
        found += ["", table]
    if job.doubled:
        found.append(Text("* runs more than one stage until a replacement is ready", style="yellow"))
    if others := _others(job):
        each = (_worker(job, worker, state) for worker, state in others)
        found.append(Text("other workers: ").append(Text("   ").join(each)))
    return found


def _others(job: JobView) -> list[tuple[WorkerId, WorkerState]]:
    owners = {worker for row in job.plan for worker in row}
    return [one for one in (job.live.workers if job.live is not None else ()) if one[0] not in owners]


def _cells(job: JobView) -> list[list[Text]]:
    """Return the text of each cell, by pipeline and stage."""
    if job.live is None:
        styles = {worker: "yellow" if worker in job.doubled else "green" for row in job.plan for worker in row}
        return [[Text(_name(job, worker), style=styles[worker]) for worker in row] for row in job.plan]
    states, slow = dict(job.live.workers), {one.worker for one in job.live.slow}
    return [
        [
            _worker(job, worker, states.get(worker))
            .append(" slow" if worker in slow else "", "yellow")
            .append("" if held else " unprotected", "yellow")
            for worker, held in row
        ]
        for row in job.live.grid
    ]


def _worker(job: JobView, worker: WorkerId, state: WorkerState | None) -> Text:
    """Return the worker's name, and its state unless it trains. state: None if it is lost."""
    style = STYLES[state] if state else "red"
    suffix = "" if state is WorkerState.TRAINING else f" {state.value if state else 'lost'}"
    return Text(f"{_name(job, worker)}{suffix}", style)


def _name(job: JobView, worker: WorkerId) -> str:
    return job.short(worker) + ("*" if worker in job.doubled else "")


def _blocks(rows: list[list[Text]], width: int) -> list[tuple[int, int]]:
    """Return the range (first, end) of stages of each table, with as many stages as fit the width."""
    if not rows:
        return []
    stages = max(map(len, rows))
    each = max(len(f"stage {stages - 1}"), *(cell.cell_len for row in rows for cell in row)) + 3
    fit = max(1, (width - GRID_MARGIN) // each)
    return [(first, min(stages, first + fit)) for first in range(0, stages, fit)]


def _lines_of_grids(job: JobView, width: int) -> int:
    tables = len(_blocks(_cells(job), width)) * (len(job.plan) + 3)
    return tables + bool(job.doubled) + bool(_others(job))


def workers(snapshot: JobSnapshot, now: datetime, width: int) -> Table:
    """Return a table with one line per worker, with its node pool if the width allows."""
    pools = width >= 100
    heads = ("WORKER", "STATE", "RUNS", "NODE", "ZONE", "CAPACITY", *(["POOL"] if pools else []), ">AGE")
    table = plain_table(*heads)
    table.columns[3].overflow = "ellipsis"
    for worker in snapshot.workers:
        state = Text(worker.state, style=WORKER_STYLES.get(worker.state, ""))
        if worker.detail and worker.state in ("failed", "ended"):
            state.append(f" ({worker.detail})")
        table.add_row(
            snapshot.job.short(worker.name),
            state,
            _runs(worker),
            worker.node or "-",
            worker.zone or "-",
            worker.capacity or "-",
            *([worker.pool or "-"] if pools else []),
            phrases.age(worker.created, now),
        )
    return table


def _runs(worker: RemoteWorker) -> str:
    """Return the worker's cells as pipeline/stage, separated by spaces; "-" if it has none."""
    return " ".join(f"{pipeline}/{stage}" for pipeline, stage in worker.cells) or "-"


def conditions(found: Iterable[ReportedCondition], now: datetime) -> Table:
    """Return a table of all conditions, with sentences only for unusual ones."""
    table = plain_table("CONDITION", "HOLDS", ">FOR")
    table.add_column("WHY", overflow="fold")
    for condition in found:
        usual = _is_usual(condition)
        why = condition.reason if usual else f"{condition.reason}: {condition.message}"
        holds = Text(str(condition.holds), style="" if usual or condition.type == "Complete" else "yellow")
        table.add_row(condition.type, holds, phrases.age(condition.last_transition_time, now), Text(why))
    return table


def _is_usual(condition: ReportedCondition) -> bool:
    """Return whether a condition needs no attention: it has its normal value, redundancy is off, or the job is idle."""
    idle = condition.reason == "JobOver" or (condition.reason == "Suspended" and not condition.holds)
    return idle or condition.reason == OFF or condition.holds is (condition.type in HOLD_WHEN_ALL_IS_WELL)


def events(found: Iterable[JobEvent], now: datetime, job: JobView, *, times: bool = False) -> list[Text]:
    """Return a line per event. times: show UTC times instead of ages."""
    shown = []
    for one in found:
        at = one.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else f"{phrases.age(one.at, now):>4}"
        about = "" if one.about in ("", job.name) or one.message.startswith(one.about) else f"{job.short(one.about)}: "
        often = f" (x{one.count})" if one.count > 1 else ""
        line = f"{at} {one.reason}: {about}{one.message}{often}"
        shown.append(Text(line, style="yellow" if one.warning else ""))
    return shown
