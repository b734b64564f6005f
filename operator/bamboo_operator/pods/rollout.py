"""Decisions of a rollout: which outdated worker to replace next, and when to stop replacing.

Pure. An outdated worker that is not ready is deleted. A ready one is released by a planned takeover, while every stage
has a second copy if the job keeps copies. The next one is released only after the successor is ready.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from bamboo_core.planning.plan import WorkerId

READY_SECONDS = 600.0  # within which a new worker has to become ready
MOST_FAILURES = 3  # failed new workers after which the rollout stalls
LONGEST_MESSAGE = 1000
ALONE = "a job of one worker has nobody to take over; suspend and resume it"


class RolloutState(StrEnum):
    COMPLETE = "Complete"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorker:
    """A living worker, as a rollout sees it. updated: its pod is of the newest template."""

    name: WorkerId
    updated: bool
    placed: bool = True  # it has a node
    ready: bool = False  # its task is loaded, and there is a plan
    idle: bool = False  # it owns no stage, and its replicas are in step
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A job's workers and state at one moment, from which a rollout's next step is decided."""

    revision: str  # the newest, as the rollout reports it
    templates: frozenset[str] = frozenset()  # the revisions of the pods of all pools
    workers: tuple[RolloutWorker, ...]
    wanted: int  # number of workers that the job asks for
    begun: bool  # a plan exists
    training: bool  # the coordinator's phase is Running
    held: bool  # every stage is held twice, or is not meant to be, and no worker runs two stages
    since: datetime | None = None  # when the rollout began, by its record, else by the outdated pods
    failures: tuple[str, ...] = ()  # how new workers have ended by themselves since the rollout began
    futile: str = ""  # why no new worker can ever become ready
    problem: str = ""  # why pods do not start

    @property
    def outdated(self) -> list[RolloutWorker]:
        return [w for w in self.workers if not w.updated]

    @property
    def updated(self) -> int:
        """The number of workers that are up to date and ready."""
        return sum(w.updated and w.ready for w in self.workers)

    @property
    def starting(self) -> bool:
        """Whether a new worker has a node and is not ready yet."""
        return any(w.updated and w.placed and not w.ready for w in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """The progress of a rollout."""

    revision: str
    since: datetime  # when it began
    moved: float  # when it last progressed, or began to wait (monotonic seconds)
    waits: bool = False  # the next step waits for a new worker
    templates: frozenset[str] = frozenset()
    owed: int = 0  # number of updated workers that are needed before another one goes
    updated: int = 0
    total: int = 0
    active: bool = False
    stalled: str = ""  # why no worker is replaced

    @property
    def state(self) -> RolloutState:
        if not self.active:
            return RolloutState.COMPLETE
        return RolloutState.STALLED if self.stalled else RolloutState.PROGRESSING

    @property
    def message(self) -> str:
        """The progress as a sentence, with the reason if the rollout has stalled."""
        done = f"{self.updated} of {self.total} workers are of revision {self.revision}"
        return f"{done}; the others stay: {self.stalled}"[:LONGEST_MESSAGE] if self.stalled and self.active else done


def observed(before: RolloutRecord | None, view: RolloutView, now: float, time: datetime) -> RolloutRecord:
    """Return the record of a rollout, updated from its workers. before: None for the first look. now: monotonic
    seconds; time: the same moment as a date.
    """
    if before is None:  # another operator may have begun the rollout
        since, active = view.since or time, bool(view.outdated)
        before = RolloutRecord(revision=view.revision, templates=view.templates, since=since, moved=now, active=active)
    elif before.revision != view.revision:
        before = RolloutRecord(revision=view.revision, templates=view.templates, since=time, moved=now)
    active = bool(view.outdated)
    total = max(view.wanted, len(view.outdated))
    record = replace(before, templates=view.templates, active=active, updated=min(view.updated, total), total=total)
    if not active:
        return replace(record, moved=now, waits=False, owed=0, stalled="")
    if not before.active or (before.templates and before.templates != view.templates):
        record = replace(record, since=time, moved=now, owed=0, stalled="")
    waits = _lacks_one(record, view) or view.starting
    if record.updated != before.updated or not (waits and before.waits):
        record = replace(record, moved=now)
    record = replace(record, waits=waits)
    return record if record.stalled else replace(record, stalled=_why_stalled(record, view, now))


def released(record: RolloutRecord) -> RolloutRecord:
    """Return the record after the release of an outdated worker: the next release waits for the successor."""
    return replace(record, owed=record.updated + 1)


def _lacks_one(record: RolloutRecord, view: RolloutView) -> bool:
    """Return whether the rollout waits for the successor of the last released worker. It does not wait if the wanted
    number of workers is ready, for example because another operator requested the successor.
    """
    return record.updated < record.owed and sum(w.ready for w in view.workers) < view.wanted


def _why_stalled(record: RolloutRecord, view: RolloutView, now: float) -> str:
    if view.futile:
        return view.futile
    if view.begun and view.wanted == 1:
        return ALONE
    if len(view.failures) >= MOST_FAILURES:
        return f"{len(view.failures)} new workers have ended by themselves; {view.failures[-1]}"
    if record.waits and now - record.moved > READY_SECONDS:
        why = view.problem or "it has not joined, or its task is not loaded"
        return f"a new worker was not ready within {READY_SECONDS:g} s: {why}"
    return ""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """The next step of a rollout; at most one field is set.

    release: the worker to release. delete: the outdated worker, not ready, whose pod to delete.
    """

    release: WorkerId | None = None
    delete: WorkerId | None = None


NOTHING = RolloutStep()


def next_step(record: RolloutRecord, view: RolloutView) -> RolloutStep:
    """Decide the next step, for one worker at a time; NOTHING if the rollout has to wait, has ended or has stalled."""
    if record.state is not RolloutState.PROGRESSING:
        return NOTHING
    if late := _first(w for w in view.outdated if not w.ready and not w.leaving):  # such as after a second edit
        return RolloutStep(delete=late)
    leaving = any(w.leaving for w in view.workers)
    can_take_over = sum(w.ready for w in view.workers) > 1
    if leaving or not (view.training and view.held and can_take_over) or view.starting or _lacks_one(record, view):
        return NOTHING
    return RolloutStep(release=_first(sorted(view.outdated, key=lambda w: not w.idle)))


def _first(workers: Iterable[RolloutWorker]) -> WorkerId | None:
    return next((worker.name for worker in workers), None)
