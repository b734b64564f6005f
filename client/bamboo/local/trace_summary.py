"""`bamboo trace summary`: what the workers spent their time on, from the trace that `bamboo run --trace` wrote."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.table import Table

from bamboo_core.complaints import system_reason
from bamboo_core.metrics.time_use import REDUNDANT, TIME_USE_OF_SPAN, TimeUse

MAX_BYTES = 512 << 20  # some 3.5 bytes of memory a byte
Micros = Annotated[float, msgspec.Meta(ge=0, le=1e17)]


class TraceError(ValueError):
    """The file cannot be summarised; one sentence."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """The arguments of an event of a trace; which ones are set depends on the event."""

    name: str = ""
    epoch: int = 0
    pipeline: int = 0
    stage: int = 0
    step: int = 0
    reform_ms: float = 0.0
    recompute_ms: float = 0.0


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    """What counts of an event of Chrome's trace format."""

    ph: str  # X a span, i an instant, M a name
    pid: int
    name: str = ""
    cat: str = ""
    # ts, dur: microseconds
    ts: Micros = 0.0
    dur: Micros = 0.0
    args: Arguments = Arguments()


class _Document(msgspec.Struct):
    events: list[TraceEvent] = msgspec.field(name="traceEvents")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedTakeover:
    worker: str
    epoch: int
    pipeline: int
    stage: int
    step: int
    reform_ms: float
    recompute_ms: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTime:
    """A worker's time, or everybody's. Shares are of worker_seconds, and None where there is nothing to divide by."""

    name: str
    wall_seconds: float  # from the first plan in force, or the first span, to the last span's end
    worker_seconds: float  # the same for one worker, the workers' sum for all
    seconds: Mapping[TimeUse, float]
    takeovers: int  # in mid-step; a planned move at a step's boundary is none

    def share(self, kind: TimeUse) -> float | None:
        return _ratio(self.seconds[kind], self.worker_seconds)

    @property
    def other(self) -> float | None:
        """What lies between the spans: frames taken in and sent, plans obeyed, the engine itself."""
        return _ratio(max(0.0, self.worker_seconds - sum(self.seconds.values())), self.worker_seconds)

    @property
    def bubble(self) -> float | None:
        """What would be idle without redundant work."""
        return _ratio(self.seconds[TimeUse.IDLE] + self._redundant, self.worker_seconds)

    @property
    def filled(self) -> float | None:
        """The share of the bubble that redundant work took."""
        return _ratio(self._redundant, self.seconds[TimeUse.IDLE] + self._redundant)

    @property
    def _redundant(self) -> float:
        return sum(self.seconds[kind] for kind in REDUNDANT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    workers: tuple[WorkerTime, ...]
    overall: WorkerTime
    takeovers: tuple[TracedTakeover, ...]


@dataclasses.dataclass(slots=True)
class _Account:
    """A worker's, while events are read."""

    name: str
    # first, last: microseconds
    first: float = float("inf")
    last: float = float("-inf")
    micros: dict[TimeUse, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TimeUse, 0.0))
    takeovers: list[Arguments] = dataclasses.field(default_factory=list)

    @property
    def wall_seconds(self) -> float:
        return max(0.0, self.last - self.first) / 1e6


def summarize_trace(events: Iterable[TraceEvent]) -> TraceSummary:
    """Adds up every worker's time. The events may come in any order."""
    accounts: dict[int, _Account] = {}
    for event in events:
        account = accounts.setdefault(event.pid, _Account(f"process {event.pid}"))
        match event.ph, event.cat:
            case "M", _ if event.name == "process_name":
                account.name = event.args.name.removeprefix("worker ")
            case "X", category:
                account.first, account.last = min(account.first, event.ts), max(account.last, event.ts + event.dur)
                if category in TIME_USE_OF_SPAN:
                    account.micros[TIME_USE_OF_SPAN[category]] += event.dur
            case "i", "Epoch":
                account.first, account.last = min(account.first, event.ts), max(account.last, event.ts)
            case "i", "Takeover":
                account.takeovers.append(event.args)
    ordered = sorted(accounts.values(), key=lambda account: (len(account.name), account.name))
    return TraceSummary(
        workers=tuple(_usage(account.name, account.wall_seconds, [account]) for account in ordered),
        overall=_usage("all", _span(ordered), ordered),
        takeovers=tuple(_takeover(account.name, args) for account in ordered for args in account.takeovers),
    )


def _usage(name: str, wall_seconds: float, accounts: Sequence[_Account]) -> WorkerTime:
    return WorkerTime(
        name=name,
        wall_seconds=wall_seconds,
        worker_seconds=sum(account.wall_seconds for account in accounts),
        seconds={kind: sum(account.micros[kind] for account in accounts) / 1e6 for kind in TimeUse},
        takeovers=sum(len(account.takeovers) for account in accounts),
    )


def _span(accounts: Sequence[_Account]) -> float:
    last = max((account.last for account in accounts), default=0.0)
    return max(0.0, last - min((account.first for account in accounts), default=0.0)) / 1e6


def _takeover(worker: str, args: Arguments) -> TracedTakeover:
    return TracedTakeover(
        worker=worker,
        epoch=args.epoch,
        pipeline=args.pipeline,
        stage=args.stage,
        step=args.step,
        reform_ms=args.reform_ms,
        recompute_ms=args.recompute_ms,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a trace file. Raises TraceError if there is nothing in it to summarise."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise TraceError(f"{path}: expected a trace of at most {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: {system_reason(error)}") from None
    return parse_trace(data, str(path))


def parse_trace(data: bytes, source: str) -> list[TraceEvent]:
    """The events of a trace. source: what a mistake is blamed on. Both of the format's forms are understood: a list, or
    an object with one.
    """
    if not data.strip():
        raise TraceError(f"{source}: expected a trace, and the file is empty")
    try:
        if data.lstrip().startswith(b"["):
            events = msgspec.json.decode(data, type=list[TraceEvent])
        else:
            events = msgspec.json.decode(data, type=_Document).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{source}: expected a trace that `bamboo run --trace` wrote: {error}") from None
    if not any(event.ph == "X" and event.cat in TIME_USE_OF_SPAN for event in events):
        raise TraceError(f"{source}: expected a trace that `bamboo run --trace` wrote: no instruction is in it")
    return events


# what is shown

HEADINGS = {
    TimeUse.FORWARD: "forward",
    TimeUse.BACKWARD: "backward",
    TimeUse.REDUNDANT_FORWARD: "redundant\nforward",
    TimeUse.REDUNDANT_BACKWARD: "redundant\nbackward",
    TimeUse.REHEARSAL: "rehearsal",
    TimeUse.REDUCTION: "reduction",
    TimeUse.SYNC_COMMIT: "sync,\ncommit",
    TimeUse.OPTIMIZER: "optimizer",
    TimeUse.REPLICA_UPDATE: "replica\nupdate",
    TimeUse.IDLE: "idle",
}
LEGEND = (
    "Shares of a worker's wall time; all: of everybody's. bubble: idle and redundant work (with rehearsals);"
    "\nfilled: the share of the bubble that redundant work took; other: frames, plans, the engine itself."
)


def to_json(summary: TraceSummary) -> str:
    document = {
        "workers": [_to_dict(usage) for usage in summary.workers],
        "overall": _to_dict(summary.overall),
        "takeovers": [dataclasses.asdict(takeover) for takeover in summary.takeovers],
    }
    return json.dumps(document, indent=2)


def _to_dict(usage: WorkerTime) -> dict[str, Any]:
    shares = {str(kind): usage.share(kind) for kind in TimeUse}
    return {
        "name": usage.name,
        "wall_seconds": usage.wall_seconds,
        "worker_seconds": usage.worker_seconds,
        "shares": {**shares, "other": usage.other},
        "bubble_share": usage.bubble,
        "bubble_filled_share": usage.filled,
        "takeovers": usage.takeovers,
    }


def rows(summary: TraceSummary) -> list[list[str]]:
    """The table, headings first, everybody's sum last. Kinds of work that nobody did have no column."""
    kinds = [kind for kind in TimeUse if summary.overall.seconds[kind] > 0]
    table = [["worker", "wall", *(HEADINGS[kind] for kind in kinds), "other", "bubble", "bubble\nfilled", "takeovers"]]
    for usage in (*summary.workers, summary.overall):
        shares = [*(usage.share(kind) for kind in kinds), usage.other, usage.bubble, usage.filled]
        table.append([usage.name, f"{usage.wall_seconds:.2f} s", *map(_percent, shares), str(usage.takeovers)])
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}%"


def to_text(summary: TraceSummary) -> str:
    """Plain columns."""
    headings, *body = rows(summary)
    above = [heading.rpartition("\n")[0] for heading in headings]
    lines = [above, [heading.rpartition("\n")[2] for heading in headings], *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    return f"{text}\n\n{LEGEND}"


def show(summary: TraceSummary, console: Console) -> None:
    """A table on a terminal, plain columns elsewhere or where the table would not fit."""
    headings, *body = rows(summary)
    table = Table(caption=LEGEND, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for row in body[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*body[-1], style="bold")
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    if console.is_terminal and needed <= console.width:
        console.print(table)
    else:
        console.out(to_text(summary), highlight=False)
