"""The schedule of deliberate preemptions in a local run: parsing, and the preemptions that are due.

    none                        nothing happens (the default)
    random:RATE                 RATE preemptions per minute over the whole job, a Poisson process
    at:STEP[:STAGE][:notice]    once, in the middle of that step; the first step is 1 (see bamboo.local.preemptor)
    trace:FILE[:SPEEDUP]        recorded (see bamboo.traces); each removal of a node takes a random worker
    nodes:FILE[:SPEEDUP]        the recorded nodes, from the first one on, limit how many workers run at a time

Random choices are functions of the seed and of a running number, so that a run can be repeated.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bamboo.traces.files import read_trace
from bamboo.traces.trace import Change, Trace, removal_times
from bamboo_core.coordinator.events import Status, WorkerState
from bamboo_core.job.spec import JobSpec, fewest_workers, most_stages
from bamboo_core.planning.plan import WorkerId

NOTICE_SECONDS = 30.0
TAKEABLE = (WorkerState.STANDBY, WorkerState.SYNCING, WorkerState.TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A due preemption of an owner of `stage`, or of any worker if None. `pick`, in [0, 1), chooses the worker."""

    pick: float
    stage: int | None = None
    notice: bool = False
    step: int | None = None  # in the middle of the step that follows this many committed ones; None: at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """A preemption in the middle of a step, of an owner of `stage`, or of any worker if None."""

    step: int  # steps committed before it; users count one more
    stage: int | None = None
    notice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRandom:
    """Random preemptions, a Poisson process. due_at: second of training of the next one. drawn: its number, from 1."""

    per_minute: float
    due_at: float = 0.0
    drawn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtTimes:
    seconds: tuple[float, ...]


Entry = AtStep | AtRandom | AtTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The number of available nodes from second `at` of the played recording on, until the next Room."""

    at: float
    nodes: int
    notice: bool  # a worker that loses its node gets notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The planned preemptions of a run, and the available nodes over time."""

    seed: int = 0
    entries: tuple[Entry, ...] = ()
    drawn: int = 0  # preemptions handed out so far
    rooms: tuple[Room, ...] = ()  # in the order of time, the first at 0; empty: there is room for all workers


def parse(texts: Iterable[str], *, seed: int = 0) -> Schedule:
    """Parse the values of --preempt into a schedule. Raises ValueError, which names the value and its problem."""
    entries: list[Entry] = []
    rooms: tuple[Room, ...] = ()
    for number, text in enumerate(texts):
        kind, _, rest = text.strip().partition(":")
        try:
            match kind:
                case "none" if not rest:
                    continue
                case "random":
                    entries.append(_next(AtRandom(per_minute=_rate(rest)), f"{seed}:{number}"))
                case "at":
                    entries.append(_at_step(rest))
                case "trace":
                    entries.append(_trace(rest))
                case "nodes" if rooms:
                    raise ValueError("nodes: may be given once")
                case "nodes":
                    rooms = _rooms(rest)
                case _:
                    raise ValueError(
                        "expected none, random:RATE, at:STEP[:STAGE][:notice], trace:FILE[:SPEEDUP] or"
                        " nodes:FILE[:SPEEDUP]"
                    )
        except ValueError as error:
            raise ValueError(f"--preempt {text}: {error}") from None
    return Schedule(seed=seed, entries=tuple(entries), rooms=rooms)


def check(schedule: Schedule, spec: JobSpec) -> None:
    """Raise ValueError for a preemption in a step or stage that the job lacks, or a recording with too few nodes."""
    steps, stages = spec.training.steps, most_stages(spec)
    if schedule.rooms:
        most, fewest = max(room.nodes for room in schedule.rooms), fewest_workers(spec)
        if most * spec.spread.workers_per_node < fewest:
            needed = math.ceil(fewest / spec.spread.workers_per_node)
            why = f"the job begins with no fewer than {fewest} workers"
            raise ValueError(f"--preempt nodes: expected {needed} nodes at a time, as {why}; the recording has {most}")
    for entry in schedule.entries:
        if isinstance(entry, AtStep):
            if entry.stage is not None and entry.stage >= stages:
                raise ValueError(f"--preempt at:{entry.step + 1}:{entry.stage}: the job has stages 0 to {stages - 1}")
            if entry.step >= steps:
                raise ValueError(f"--preempt at:{entry.step + 1}: the job has steps 1 to {steps}")


def due(schedule: Schedule, step: int, now: float) -> tuple[tuple[Preemption, ...], Schedule]:
    """Return (preemptions that are due, remaining schedule). step: as in `Preemptor.due`. now: seconds of training."""
    found: list[Preemption] = []
    left: list[Entry] = []
    for number, entry in enumerate(schedule.entries):
        count, rest = _advance(entry, step, now, f"{schedule.seed}:{number}")
        for _ in range(count):
            pick = random.Random(f"{schedule.seed}:pick:{schedule.drawn + len(found)}").random()
            if isinstance(entry, AtStep):
                found.append(Preemption(pick=pick, stage=entry.stage, notice=entry.notice, step=entry.step))
            else:
                found.append(Preemption(pick=pick))
        left.append(rest)
    rest_of_it = replace(schedule, entries=tuple(left), drawn=schedule.drawn + len(found))
    return tuple(found), rest_of_it


def steps_of(schedule: Schedule) -> tuple[int, ...]:
    """Return the steps (counted from 0) with a preemption in their middle, ascending."""
    return tuple(sorted({entry.step for entry in schedule.entries if isinstance(entry, AtStep)}))


def victim(preemption: Preemption, status: Status, gone: Iterable[WorkerId] = ()) -> WorkerId | None:
    """Return the worker to take: an owner of the stage, or any if no stage is given; None if there is no candidate.

    gone: workers to exclude. Workers that are not ready or are leaving are always excluded.
    """
    excluded = set(gone)
    alive = [w for w, state in status.workers if state in TAKEABLE and w not in excluded]
    if preemption.stage is not None:
        owners = {row[preemption.stage][0] for row in status.grid if preemption.stage < len(row)}
        alive = [w for w in alive if w in owners]
    return alive[int(preemption.pick * len(alive))] if alive else None


def _advance(entry: Entry, step: int, now: float, seed: str) -> tuple[int, Entry]:
    """Return (number of preemptions due now, remaining entry); a used AtStep becomes an empty AtTimes."""
    match entry:
        case AtStep():
            return (1, AtTimes(seconds=())) if step >= entry.step else (0, entry)
        case AtTimes():
            left = tuple(t for t in entry.seconds if t > now)
            return len(entry.seconds) - len(left), AtTimes(seconds=left)
        case AtRandom():
            count = 0
            while entry.due_at <= now:
                entry, count = _next(entry, seed), count + 1
            return count, entry


def _next(entry: AtRandom, seed: str) -> AtRandom:
    if not entry.per_minute:
        return replace(entry, due_at=math.inf)
    wait = random.Random(f"{seed}:wait:{entry.drawn}").expovariate(entry.per_minute / 60)
    return replace(entry, due_at=entry.due_at + wait, drawn=entry.drawn + 1)


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{what} must be a number, not {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, not {text!r}")
    return value


def _rate(text: str) -> float:
    rate = _number(text, "RATE (preemptions per minute)")
    if not 0 <= rate <= 600:
        raise ValueError(f"RATE (preemptions per minute) must be between 0 and 600, not {text}")
    return rate


def _whole(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{what} must be a whole number from 0 up, not {text!r}")
    return int(text)


def _at_step(text: str) -> AtStep:
    parts = text.split(":")
    notice = len(parts) > 1 and parts[-1] == "notice"
    if notice:
        parts.pop()
    if len(parts) > 2:
        raise ValueError("expected at:STEP[:STAGE][:notice]")
    stage = _whole(parts[1], "STAGE") if len(parts) == 2 else None
    step = _whole(parts[0], "STEP")
    if not step:
        raise ValueError("STEP must be 1 or more: the first step is step 1")
    return AtStep(step=step - 1, stage=stage, notice=notice)


def _trace(text: str) -> AtTimes:
    trace, speedup = _recorded(text)
    removed = removal_times(trace)
    if not removed:
        raise ValueError(f"{text} contains no removal of a node")
    return AtTimes(seconds=tuple(seconds / speedup for seconds in removed))


def _rooms(text: str) -> tuple[Room, ...]:
    """Parse FILE[:SPEEDUP]; return the available nodes over time, without nodes on notice. Raises ValueError."""
    trace, speedup = _recorded(text)
    if not trace.changes:
        raise ValueError(f"{text} contains no node that comes or goes, only prices")
    begin = trace.changes[0].at
    changes = []
    for change in trace.changes:
        notice = change.notice or 0.0 if change.change is Change.REMOVE else 0.0
        at = max(0.0, change.at - notice - begin) / speedup
        changes.append((at, 1 if change.change is Change.ADD else -1, notice > 0))
    found, nodes = [Room(at=0.0, nodes=0, notice=False)], 0
    for at, difference, notice in sorted(changes):
        nodes += difference
        earlier = found[:-1] if found[-1].at == at else found
        found = [*earlier, Room(at=at, nodes=nodes, notice=notice)]
    return tuple(found)


def room_at(schedule: Schedule, now: float) -> Room | None:
    """Return the Room in force at second `now` of the played recording; None without recorded nodes."""
    return next((room for room in reversed(schedule.rooms) if room.at <= now), None)


def _recorded(text: str) -> tuple[Trace, float]:
    """Parse FILE[:SPEEDUP], and read the file. Return the recording and the speedup. Raises ValueError."""
    path, speedup = text, 1.0
    head, _, tail = text.rpartition(":")
    if head and "/" not in tail and not tail.endswith((".csv", ".jsonl")):
        path, speedup = head, _number(tail, "SPEEDUP")
    if not path:
        raise ValueError("FILE is missing")
    if speedup <= 0:
        raise ValueError(f"SPEEDUP must be more than 0, not {speedup:g}")
    return read_trace(path), speedup
