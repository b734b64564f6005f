"""Replaces the workers whose pods are out of date, one after the other, while the job trains.

Pure. A new worker is requested beyond those wanted; when it is ready, and every stage is held twice, one of the old
ones is let go by a planned takeover. Where there is no room for one more, an old one goes first. If new workers do not
become ready, nobody else is replaced.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum, auto

from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.status import RolloutStatus
from bamboo_core.planning.plan import WorkerId

NO_ROOM_SECONDS = 60.0  # for which a pod finds no node, or is refused, before an old worker goes first
MOST_FAILURES = 3  # new workers that ended by themselves
LONGEST_MESSAGE = 1000


class RolloutState(StrEnum):
    COMPLETE = "Complete"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    STALLED = "Stalled"


class Act(StrEnum):
    """SURGE: request a worker beyond those wanted. RELEASE: let one go. DELETE: a pod that is of no use."""

    NOTHING = auto()
    SURGE = auto()
    RELEASE = auto()
    DELETE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorker:
    """A living worker's pod."""

    name: WorkerId
    updated: bool
    placed: bool = True  # it has a node
    ready: bool = False  # its task is loaded
    idle: bool = False  # it owns no stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """What a rollout sees of the workers."""

    revision: str  # of the newest template
    section: str = ""  # a digest of what the user wrote of it
    workers: tuple[RolloutWorker, ...]
    wanted: int  # how many workers the job asks for
    begun: bool  # is there a plan?
    training: bool  # it is in force, and no worker is missing from it
    held: bool  # every stage is held twice, or is not meant to be, by as many workers as before
    leaving: bool  # is anybody?
    no_room: float = 0.0  # seconds for which some pod has found no node or has been refused
    refused: str = ""  # why
    failures: tuple[str, ...] = ()  # how new workers have ended by themselves since the rollout began
    futile: str = ""  # why no new one can ever be ready
    problem: str = ""  # why pods do not start
    paused: bool = False
    max_surge: int = 1
    deadline: float = 600.0

    @property
    def outdated(self) -> list[RolloutWorker]:
        return [w for w in self.workers if not w.updated]

    @property
    def updated(self) -> int:
        """The number of workers that are up to date and ready."""
        return sum(w.updated and w.ready for w in self.workers)

    @property
    def coming(self) -> list[RolloutWorker]:
        """New workers that are not ready yet."""
        return [w for w in self.workers if w.updated and not w.ready]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """How far a rollout is."""

    revision: str
    since: datetime  # when it began, or began anew after a pause
    moved: float  # when it last came further, or began to wait (monotonic seconds)
    waits: bool = False  # a new worker is what the next step waits for
    section: str = ""
    owed: int = 0  # how many have to be of the newest revision before another one goes
    updated: int = 0
    total: int = 0
    active: bool = False
    paused: bool = False
    old_first: bool = False  # an old worker goes before the new one comes
    stalled: str = ""  # why nobody is replaced

    @property
    def state(self) -> RolloutState:
        if not self.active:
            return RolloutState.COMPLETE
        if self.paused:
            return RolloutState.PAUSED
        return RolloutState.STALLED if self.stalled else RolloutState.PROGRESSING

    @property
    def message(self) -> str:
        """A sentence."""
        done = f"{self.updated} of {self.total} workers are of revision {self.revision}"
        if self.state is RolloutState.STALLED:
            return f"{done}; the others stay: {self.stalled}"[:LONGEST_MESSAGE]
        return f"{done}; spec.rollout.paused is true" if self.state is RolloutState.PAUSED else done

    def status(self) -> RolloutStatus:
        """The record as the job's status has it."""
        return RolloutStatus(
            revision=self.revision,
            state=self.state.value,
            updated=self.updated,
            total=self.total,
            start_time=whole_seconds(self.since),
            message=self.stalled[:LONGEST_MESSAGE] or None,
        )

    @classmethod
    def of(cls, status: RolloutStatus | None, now: float) -> "RolloutRecord | None":
        """What an operator before this one has written; None if it has not, or nobody could."""
        if status is None or status.start_time is None:
            return None
        return cls(
            revision=status.revision,
            since=status.start_time,
            moved=now,
            active=status.state != RolloutState.COMPLETE,
            paused=status.state == RolloutState.PAUSED,
            stalled=status.message or "" if status.state == RolloutState.STALLED else "",
        )


def observed(before: RolloutRecord | None, view: RolloutView, now: float, time: datetime) -> RolloutRecord:
    """The record after a look at what there is. now: monotonic seconds; time: the same by the calendar."""
    if before is None or before.revision != view.revision:
        before = RolloutRecord(revision=view.revision, section=view.section, since=time, moved=now)
    outdated, active = view.outdated, bool(view.outdated)
    total = max(view.wanted, len(outdated))
    updated = min(view.updated, total)
    record = replace(
        before, section=view.section, active=active, paused=view.paused and active, updated=updated, total=total
    )
    if not active or view.paused:
        return replace(record, moved=now, waits=False, old_first=False, owed=0, stalled="")
    if not before.active or before.paused or (before.section and before.section != view.section):
        record = replace(record, since=time, moved=now, stalled="")
    waits = _waits(record, view)
    if updated != before.updated or not (waits and before.waits):
        record = replace(record, moved=now)
    record = replace(record, waits=waits)
    if record.stalled:
        return record
    if not record.old_first and (view.no_room > NO_ROOM_SECONDS or not view.max_surge):
        record = replace(record, old_first=True)
    return replace(record, stalled=_why_stalled(record, view, now))


def deadlines(record: RolloutRecord, view: RolloutView, now: float) -> Iterator[float]:
    """The times at which a rollout stops, or goes on in another way, if nothing happens. now: of the view (monotonic
    seconds).
    """
    if record.state is RolloutState.PROGRESSING:
        if record.waits:
            yield record.moved + view.deadline
        if not record.old_first:
            yield now + NO_ROOM_SECONDS - view.no_room


def released(record: RolloutRecord) -> RolloutRecord:
    """The record after an old worker was let go."""
    return replace(record, owed=record.updated + 1) if record.old_first else record


def _waits(record: RolloutRecord, view: RolloutView) -> bool:
    """Is it a new worker that the next step waits for?"""
    if record.old_first:
        return record.updated < record.owed or any(w.placed for w in view.coming)
    return bool(view.coming or view.refused)


def _why_stalled(record: RolloutRecord, view: RolloutView, now: float) -> str:
    if view.futile:
        return view.futile
    if len(view.failures) >= MOST_FAILURES:
        return f"{len(view.failures)} new workers have ended by themselves; {view.failures[-1]}"
    if now - record.moved > view.deadline:
        why = view.refused or view.problem or "it is running and has not joined, or its task is not loaded"
        return f"a new worker was not ready within {view.deadline:g} s: {why}"
    return ""


def makes_newest(record: RolloutRecord, view: RolloutView) -> bool:
    """Is a worker that is missing made as the newest template says, or as those that are there were?

    Until a new one has been ready nobody knows whether the newest template is any good.
    """
    if not any(w.ready for w in view.outdated):
        return True
    return not record.stalled and (view.updated > 0 or (record.old_first and not record.paused))


@dataclass(frozen=True, slots=True)
class RolloutStep:
    act: Act = Act.NOTHING
    worker: WorkerId = ""


NOTHING = RolloutStep()


def next_step(record: RolloutRecord, view: RolloutView) -> RolloutStep:
    """What to do now; one worker at a time."""
    outdated = view.outdated
    if record.state is RolloutState.STALLED and any(w.ready for w in outdated):
        return _first(Act.DELETE, [w.name for w in view.coming])  # their place may be needed
    if record.state is RolloutState.PAUSED and len(view.workers) > view.wanted:
        return _first(Act.DELETE, [w.name for w in view.coming])
    if record.state is not RolloutState.PROGRESSING:
        return NOTHING
    useless = [w for w in outdated if not w.ready and (not w.placed or not view.begun)]
    if useless and makes_newest(record, view):
        return _first(Act.DELETE, [w.name for w in useless])
    if view.leaving or not view.training or not view.held or any(w.placed for w in view.coming):
        return NOTHING
    leavers = [w.name for w in sorted(outdated, key=lambda w: not w.idle) if w.ready]
    if len(view.workers) > view.wanted and not view.coming:
        late = [w.name for w in outdated if not w.ready]  # as if another edit came before they were ready
        return _first(Act.DELETE, late) if late else _first(Act.RELEASE, leavers)
    if not record.old_first:
        return NOTHING if view.coming or not leavers else RolloutStep(Act.SURGE)
    can_take_over = sum(w.ready for w in view.workers) > 1
    return _first(Act.RELEASE, leavers) if can_take_over and record.updated >= record.owed else NOTHING


def _first(act: Act, workers: Collection[WorkerId]) -> RolloutStep:
    return next((RolloutStep(act, worker) for worker in workers), NOTHING)
