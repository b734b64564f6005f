"""What a person sees of jobs on a cluster: tables and pages for rich, legible at 80 columns. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bamboo.remote.job_view import phrases
from bamboo.remote.job_view.objects import JobEvent, RemoteWorker
from bamboo_core.coordinator.protection import OFF
from bamboo_core.job.status import ReportedCondition
from bamboo_core.view.job_view import JobView

STATE_STYLES = {
    "Running": "green",
    "Complete": "green",
    "Saving": "green",
    "Degraded": "yellow",
    "Restoring": "yellow",
    "Pending": "cyan",
    "Suspended": "cyan",
    "Failed": "bold red",
    "Invalid": "bold red",
}
WORKER_STYLES = {  # in the order of their interest
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
SHOWN_EVENTS = 8
GRID_MARGIN = 12  # the column of pipelines


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """A job, as far as the user may see what belongs to it. missing: what could not be looked at, in words."""

    job: JobView
    workers: tuple[RemoteWorker, ...] = ()
    events: tuple[JobEvent, ...] = ()
    missing: tuple[str, ...] = ()


def jobs(found: Sequence[JobView], now: datetime, *, namespaces: bool = False) -> Table:
    """A line for each job. namespaces: whether they differ."""
    table = _plain_table(*(["NAMESPACE"] if namespaces else []), "NAME", "STATE")
    _right(table, "STEP", "PIPELINES", "WORKERS")
    table.add_column("PROTECTED", no_wrap=True)
    _right(table, "PREEMPTIONS", "AGE")
    for job in found:
        cells: list[str | Text] = [
            *([job.namespace] if namespaces else []),
            job.name,
            state(job),
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
    """Everything there is to say about a job."""
    job = snapshot.job
    parts: list[RenderableType] = [*head(snapshot, now), *grids(job, width)]
    if snapshot.workers:
        parts += ["", workers(snapshot, now, width)]
    if job.status.conditions:
        parts += ["", conditions(job.status.conditions, now)]
    if snapshot.events:
        parts += ["", *events(snapshot.events[-SHOWN_EVENTS:], now, job)]
    return Group(*parts)


def live(snapshot: JobSnapshot, now: datetime, width: int, height: int, keys: str = "") -> RenderableType:
    """What there is to say about a job while it runs, in at most `height` lines: of workers and events those that tell
    most.
    """
    parts: list[RenderableType] = [*head(snapshot, now), *grids(snapshot.job, width)]
    last = [Text(keys, style="dim italic")] if keys else []
    room = height - _lines_of_head(snapshot, now, width) - _lines_of_grids(snapshot.job, width) - len(last)
    told = min(SHOWN_EVENTS, len(snapshot.events), max(room // 2, 4))
    listed, used = workers_within(snapshot, now, width, room - told)
    room = max(0, room - used)
    shown = snapshot.events[-min(SHOWN_EVENTS, room) :] if room else ()
    return Group(*parts, *listed, *events(shown, now, snapshot.job, one_line=True), *last)


def workers_within(snapshot: JobSnapshot, now: datetime, width: int, lines: int) -> tuple[list[RenderableType], int]:
    """The workers in that many lines, and how many it took: the most interesting ones."""
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


def head(snapshot: JobSnapshot, now: datetime) -> list[RenderableType]:
    """What the job is, how it gets on, and what is wrong."""
    job, status = snapshot.job, snapshot.job.status
    about = f"  {job.namespace}, epoch {status.epoch}, {phrases.age(job.metadata.creation_timestamp, now)} old"
    lines: list[RenderableType] = [
        Text.assemble((job.name, "bold"), "  ", state(job), (about, "dim")),
        Text(phrases.progress(job), style="bold"),
        Text(phrases.counts(job)),
    ]
    if told := phrases.protection(job, now):
        lines.append(Text(told, style="yellow" if phrases.protected(job, now) in ("no", "?") else ""))
    if told := phrases.evaluation(job):
        lines.append(Text(told))
    if told := phrases.checkpoint(job, now):
        lines.append(Text(told))
    if told := phrases.rollout(job):
        lines.append(Text(told, style="yellow" if told.startswith("rollout stalled") else ""))
    if told := phrases.cost(job):
        lines.append(Text(f"cost {told}"))
    if end := job.status.ended:
        lines.append(Text(f"{end.type}: {end.message}", style="green" if end.type == "Complete" else "bold red"))
    elif waiting := phrases.why_waiting(job):
        lines.append(Text(waiting, style="yellow"))
    if stale := phrases.stale(job, now):
        lines.append(Text(stale, style="yellow"))
    degraded = status.condition("Degraded")
    if degraded is not None and degraded.holds:
        since = phrases.age(degraded.last_transition_time, now)
        lines.append(Text(f"degraded for {since}: {degraded.message}", style="yellow"))
    lines += [Text(f"not shown: {what}", style="dim") for what in snapshot.missing]
    return lines


def state(job: JobView) -> Text:
    return Text(job.status.state, style=STATE_STYLES.get(job.status.state, ""))


def grids(job: JobView, width: int) -> list[RenderableType]:
    """Who runs what: as many tables of stages, one below the other, as the width demands."""
    if not job.plan:
        return []
    marked = job.doubled
    found: list[RenderableType] = []
    for first, last in _blocks(job, width):
        table = Table(show_edge=False, pad_edge=False)
        table.add_column("pipeline", justify="right")
        for stage in range(first, last):
            table.add_column(f"stage {stage}", no_wrap=True)
        for number, row in enumerate(job.plan):
            cells = (Text(_cell(job, w, marked), style="yellow" if w in marked else "green") for w in row[first:last])
            table.add_row(str(number), *cells)
        found += ["", table]
    if marked:
        found.append(Text("* runs more than one stage until a replacement is ready", style="yellow"))
    return found


def _cell(job: JobView, worker: str, marked: set[str]) -> str:
    return job.short(worker) + ("*" if worker in marked else "")


def _blocks(job: JobView, width: int) -> list[tuple[int, int]]:
    """The stages of each table."""
    stages = max(len(row) for row in job.plan)
    longest = max(len(_cell(job, w, job.doubled)) for row in job.plan for w in row)
    each = max(longest, len(f"stage {stages - 1}")) + 3
    fit = max(1, (width - GRID_MARGIN) // each)
    return [(first, min(stages, first + fit)) for first in range(0, stages, fit)]


def workers(snapshot: JobSnapshot, now: datetime, width: int) -> Table:
    """A line for each worker. Where there is room, the node pool as well."""
    pools = width >= 100
    table = _plain_table("WORKER", "STATE", "RUNS", "NODE", "ZONE", "CAPACITY", *(["POOL"] if pools else []))
    table.add_column("AGE", justify="right", no_wrap=True)
    table.columns[3].overflow = "ellipsis"
    for worker in snapshot.workers:
        said = Text(worker.state, style=WORKER_STYLES.get(worker.state, ""))
        if worker.detail and worker.state in ("failed", "ended"):
            said.append(f" ({worker.detail})")
        table.add_row(
            snapshot.job.short(worker.name),
            said,
            _runs(worker),
            worker.node or "-",
            worker.zone or "-",
            worker.capacity or "-",
            *([worker.pool or "-"] if pools else []),
            phrases.age(worker.created, now),
        )
    return table


def _runs(worker: RemoteWorker) -> str:
    """pipeline/stage, as the grid counts them."""
    return " ".join(f"{pipeline}/{stage}" for pipeline, stage in worker.cells) or "-"


def conditions(found: Iterable[ReportedCondition], now: datetime) -> Table:
    """All of them; sentences only of those that are not as they are when all is well."""
    table = _plain_table("CONDITION", "HOLDS")
    table.add_column("FOR", justify="right", no_wrap=True)
    table.add_column("WHY", overflow="fold")
    for condition in found:
        usual = _is_usual(condition)
        why = condition.reason if usual else f"{condition.reason}: {condition.message}"
        holds = Text(str(condition.holds), style="" if usual or condition.type == "Complete" else "yellow")
        table.add_row(condition.type, holds, phrases.age(condition.last_transition_time, now), Text(why))
    return table


def _is_usual(condition: ReportedCondition) -> bool:
    """Is it as it is when all is well, or when the job is over or suspended, which another condition says?"""
    idle = condition.reason == "JobOver" or (condition.reason == "Suspended" and not condition.holds)
    return idle or condition.reason == OFF or condition.holds is (condition.type in HOLD_WHEN_ALL_IS_WELL)


def events(
    found: Iterable[JobEvent], now: datetime, job: JobView, *, one_line: bool = False, times: bool = False
) -> list[RenderableType]:
    """times: when it was, in UTC, instead of how long ago."""
    shown = []
    for one in found:
        at = one.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else f"{phrases.age(one.at, now):>4}"
        about = "" if one.about == job.name or one.message.startswith(one.about) else f"{job.short(one.about)}: "
        often = f" (x{one.count})" if one.count > 1 else ""
        line = Text(f"{at} {one.reason}: {about}{one.message}{often}", style="yellow" if one.warning else "")
        if one_line:
            line.no_wrap, line.overflow = True, "ellipsis"
        shown.append(line)
    return list(shown)


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _right(table: Table, *columns: str) -> None:
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _lines_of_head(snapshot: JobSnapshot, now: datetime, width: int) -> int:
    return sum(1 + max(0, len(str(line)) - 1) // max(1, width) for line in head(snapshot, now))


def _lines_of_grids(job: JobView, width: int) -> int:
    if not job.plan:
        return 0
    return len(_blocks(job, width)) * (len(job.plan) + 3) + (1 if job.doubled else 0)
