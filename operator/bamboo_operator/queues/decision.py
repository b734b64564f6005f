"""What a job asks its queue for, and what it may do meanwhile: a function of its wish and of its Workloads. Pure.

A job has one Workload. To grow it asks with a larger one, in whose favour Kueue ends the smaller one when it admits it,
and goes on with what it has until then. To shrink it lowers the count of the one that it has. A Workload that is
evicted gives its quota back: by a pipeline, if that suffices and the job can do with less, else as a whole, when the
job has no pod any more. What is given back by a pipeline stays evicted as long as it is that Workload: so a smaller one
takes its place, which also tells whether that was enough. One whose workers are to ask for something else, such as
more memory, goes on until Kueue has admitted another one in its place that asks for that.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bamboo_operator.queues.seats import SeatBounds
from bamboo_operator.queues.seen_workload import DEACTIVATED, PREEMPTED, REPLACED, SeenWorkload, WorkloadCondition
from bamboo_operator.queues.topology import Domain

PATIENCE_SECONDS: Final = 10.0  # after which a job asks for a pipeline less than what is not there
ENOUGH_SECONDS: Final = 20.0  # until what a job has given back was too little


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateWorkload:
    """A Workload is made. least: it may have fewer seats, down to these; None: it may not. replaces: in whose place."""

    seats: int
    least: int | None = None
    replaces: SeenWorkload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeWorkload:
    """One is to ask for so many seats. Kueue refuses it for one that holds quota if it has no slices."""

    workload: SeenWorkload
    seats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpSeats:
    """So many of the seats that one asked for are not needed any more, as long as it is admitted."""

    workload: SeenWorkload
    seats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseQuota:
    """The quota of one that was evicted is given back."""

    workload: SeenWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class TellReady:
    """Whether the job trains with the seats of that one."""

    workload: SeenWorkload
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishWorkload:
    """One is over, for that reason."""

    workload: SeenWorkload
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteWorkload:
    """One is not needed any more."""

    workload: SeenWorkload


Action = CreateWorkload | ResizeWorkload | GiveUpSeats | ReleaseQuota | TellReady | FinishWorkload | DeleteWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnding:
    """How the job has ended."""

    reason: str  # Succeeded or Failed
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueWish:
    """What a job wants of its queue. queue: None if it is in none. shape: a digest of all that its Workload asks for
    but the number of seats. slices: may Workloads replace each other? leave_seconds: in which the workers of a pipeline
    are gone that is given back, or the whole job has to go. stopped: it is suspended for another reason.
    """

    queue: str | None
    bounds: SeatBounds
    shape: str
    slices: bool
    leave_seconds: float
    stopped: bool = False
    ended: QueueEnding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNow:
    """pods: the job's pods that have not ended, those that are to go included. begun: has a training begun that has not
    been told to end? trains: does it train? None if that is not known yet.
    """

    pods: int = 0
    begun: bool = False
    trains: bool | None = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStanding:
    """What a job may do. seats: how many workers that run stages it may have; None: as many as it likes. sets: how many
    in each of their pod sets; spare: how many there are beside these. flavors, domains, pools: the names of the
    ResourceFlavors of each pod set's seats, where in a topology they are, and the names of the pools that they were
    asked for. workload: the name of the one that they are of. outgrown: do its workers ask for something else now than
    these seats are for? reason, message: why it has to be suspended, if it has no seats, or why it has fewer than it
    asks for, or other ones; "" if it has all.
    """

    seats: int | None = None
    sets: Mapping[str, int] = field(default_factory=dict)
    spare: int = 0
    flavors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    domains: Mapping[str, tuple[Domain, ...]] = field(default_factory=dict)
    pools: Mapping[str, frozenset[str]] = field(default_factory=dict)
    workload: str = ""
    outgrown: bool = False
    reason: str = ""
    message: str = ""

    @property
    def holds(self) -> bool:
        """Has the job to be suspended?"""
        return self.seats == 0 and bool(self.reason)


FREE: Final = QueueStanding()
UNKNOWN: Final = QueueStanding(seats=0, reason="WaitingForQuota", message="its Workload cannot be read or written")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDecision:
    """action: the next thing to do; when it is done, another may be. due: in how many seconds there may be something to
    do though nothing happens.
    """

    standing: QueueStanding
    action: Action | None = None
    due: float = math.inf


def decide(wish: QueueWish, seen: Sequence[SeenWorkload], now: JobNow, waited: Mapping[str, float]) -> QueueDecision:
    """seen: all Workloads of the job. waited: for how many seconds each has been as it is, by its name."""
    live = sorted((one for one in seen if not one.finished and not one.going), key=lambda one: one.number)
    if wish.ended is not None:
        reason, message = wish.ended.reason, wish.ended.message
        over = (FinishWorkload(workload=one, reason=reason, message=message) for one in live)
        return QueueDecision(standing=FREE, action=next(over, None))
    if wish.queue is None:
        return QueueDecision(standing=FREE, action=next((DeleteWorkload(workload=one) for one in live), None))
    if wish.stopped:
        gone = now.pods == 0
        return QueueDecision(standing=FREE, action=next((DeleteWorkload(workload=one) for one in live if gone), None))
    chain = _Chain.of(live, seen)
    if chain.extra is not None:
        return replace(_course(wish, chain, now, waited), action=chain.extra)
    found = _course(wish, chain, now, waited)
    if found.action is None:
        return replace(found, action=next((DeleteWorkload(workload=one) for one in chain.done), None))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """The Workloads of a job that is in a queue. holder: the newest that is admitted; evicted: without one, the newest
    that is to give back its quota. pending: the newest of those that wait. before: the one that had the seats before a
    pending one that holds quota and is not admitted. extra: what is to be done with one beside these. done: those that
    are over and of no use.
    """

    holder: SeenWorkload | None
    evicted: SeenWorkload | None
    pending: SeenWorkload | None
    before: SeenWorkload | None
    extra: Action | None
    done: Sequence[SeenWorkload]

    @classmethod
    def of(cls, live: Sequence[SeenWorkload], seen: Sequence[SeenWorkload]) -> "_Chain":
        holders, evicted = [one for one in live if one.admitted], [one for one in live if one.evicted]
        waiting = [one for one in live if not one.admitted and not one.evicted]
        holder, pending = holders[-1] if holders else None, waiting[-1] if waiting else None
        extra: list[Action] = []
        if holder is not None:
            replaced = [*holders[:-1], *evicted]
            told = f"replaced by {holder.name}"
            extra += (FinishWorkload(workload=one, reason=REPLACED, message=told) for one in replaced)
        else:
            extra += (ReleaseQuota(workload=one) for one in evicted[:-1])
        extra += (DeleteWorkload(workload=one) for one in waiting[:-1])
        before = None
        if pending is not None and pending.reserved:
            before = next((one for one in seen if one.finished and one.name == pending.replaces), None)
        return cls(
            holder=holder,
            evicted=evicted[-1] if evicted and holder is None else None,
            pending=pending,
            before=before,
            extra=next(iter(extra), None),
            done=[one for one in seen if one.finished and not one.going and one is not before],
        )


def _course(wish: QueueWish, chain: _Chain, now: JobNow, waited: Mapping[str, float]) -> QueueDecision:
    if chain.holder is not None:
        return _admitted(wish, chain.holder, chain.pending, now, waited)
    if chain.evicted is not None:
        return _evicted(wish, chain.evicted, chain.pending, now, waited)
    if chain.pending is not None:
        return _pending(wish, chain.pending, chain.before, now, waited)
    return QueueDecision(standing=_waits("the job is not queued yet"), action=_first(wish))


def _first(wish: QueueWish) -> CreateWorkload:
    bounds = wish.bounds
    partly = bounds.least < bounds.most and not wish.slices
    return CreateWorkload(seats=bounds.most, least=bounds.least if partly else None)


def _waits(message: str) -> QueueStanding:
    told = message or "the queue has not admitted the job yet"
    return QueueStanding(seats=0, reason="WaitingForQuota", message=told)


def _pending(
    wish: QueueWish, one: SeenWorkload, before: SeenWorkload | None, now: JobNow, waited: Mapping[str, float]
) -> QueueDecision:
    """The job has no seats, unless Kueue has ended the Workload that had them for one that still is being checked."""
    if before is not None and now.begun:
        seats = min(before.assigned, before.asked)
        return QueueDecision(standing=_seated(before, seats))
    bounds, standing = wish.bounds, _waits(one.told)
    if one.reserved:
        return QueueDecision(standing=_waits("quota is reserved, and admission checks are not done"))
    if one.shape != wish.shape or one.queue != wish.queue:
        return QueueDecision(standing=standing, action=DeleteWorkload(workload=one))
    if one.asked > bounds.most or (one.asked < bounds.most and not wish.slices):
        return QueueDecision(standing=standing, action=ResizeWorkload(workload=one, seats=bounds.most))
    if not one.active:
        stopped = QueueStanding(seats=0, reason="QueueDeactivated", message="its Workload is not active")
        return QueueDecision(standing=stopped)
    if not wish.slices or "QuotaReserved" not in one.conditions or one.asked <= bounds.least:
        return QueueDecision(standing=standing)
    left = PATIENCE_SECONDS - waited.get(one.name, 0.0)
    if left > 0:
        return QueueDecision(standing=standing, due=left)
    fewer = max(bounds.least, one.asked - bounds.step)
    return QueueDecision(standing=standing, action=ResizeWorkload(workload=one, seats=fewer))


def _admitted(
    wish: QueueWish, one: SeenWorkload, other: SeenWorkload | None, now: JobNow, waited: Mapping[str, float]
) -> QueueDecision:
    seats = wish.bounds.usable(one.held)
    standing = replace(_seated(one, seats), outgrown=one.shape != wish.shape)
    if message := "; ".join(_lacking(wish, seats, outgrown=standing.outgrown)):
        why = other.told if other is not None else ""
        standing = replace(standing, reason="WaitingForQuota", message=f"{message}: {why}" if why else message)
    if one.held > seats > 0 and now.pods <= seats + wish.bounds.standby:
        shrunk: Action = ResizeWorkload(workload=one, seats=seats)
        if not wish.slices:
            shrunk = GiveUpSeats(workload=one, seats=one.asked - seats)
        return QueueDecision(standing=standing, action=shrunk)
    told = one.is_true("PodsReady") if "PodsReady" in one.conditions else None
    if now.trains is not None and told is not now.trains:
        return QueueDecision(standing=standing, action=TellReady(workload=one, ready=now.trains))
    if standing.outgrown:
        return QueueDecision(standing=standing, action=_reshaping(wish, one, other))
    action, due = _growth(wish, one, other, waited)
    return QueueDecision(standing=standing, action=action, due=due)


def _lacking(wish: QueueWish, seats: int, *, outgrown: bool) -> Iterator[str]:
    """What an admitted job does not have, in words."""
    if seats < wish.bounds.most:
        later = "" if wish.slices else ", and admits more, without workload slices, after a suspension"
        yield f"the queue has admitted {seats} of {wish.bounds.most} workers{later}"
    if outgrown:
        yield "what the workers ask for now is not admitted yet"


def _reshaping(wish: QueueWish, one: SeenWorkload, other: SeenWorkload | None) -> Action | None:
    """What is to be done about the Workload that asks for as many workers as there are, of another kind."""
    seats = wish.bounds.usable(one.held)
    if other is None:
        return CreateWorkload(seats=seats, replaces=one) if seats else None
    if other.reserved:
        return None
    if other.replaces != one.name or other.shape != wish.shape:
        return DeleteWorkload(workload=other)
    return ResizeWorkload(workload=other, seats=seats) if seats not in (0, other.asked) else None


def _growth(
    wish: QueueWish, one: SeenWorkload, larger: SeenWorkload | None, waited: Mapping[str, float]
) -> tuple[Action | None, float]:
    """What is to be done about a larger Workload, and in how many seconds there may be more."""
    bounds, held = wish.bounds, one.held
    if larger is None:
        grows = wish.slices and held < bounds.most
        return CreateWorkload(seats=bounds.most, replaces=one) if grows else None, math.inf
    if larger.reserved:
        return None, math.inf
    useless = larger.replaces != one.name or larger.shape != wish.shape or larger.asked <= held
    if useless or held >= bounds.most:
        return DeleteWorkload(workload=larger), math.inf
    if larger.asked > bounds.most:
        return ResizeWorkload(workload=larger, seats=bounds.most), math.inf
    fewer = larger.asked - bounds.step
    if fewer <= held or "QuotaReserved" not in larger.conditions:
        return None, math.inf
    left = PATIENCE_SECONDS - waited.get(larger.name, 0.0)
    return (ResizeWorkload(workload=larger, seats=fewer), math.inf) if left <= 0 else (None, left)


def _evicted(
    wish: QueueWish, one: SeenWorkload, smaller: SeenWorkload | None, now: JobNow, waited: Mapping[str, float]
) -> QueueDecision:
    condition = one.conditions["Evicted"]
    away = _taken_away(condition)
    fewer = one.held - wish.bounds.step
    can_shrink = wish.slices and condition.reason == PREEMPTED and now.begun
    mine = smaller is not None and smaller.replaces == one.name and smaller.asked <= one.held
    if not can_shrink or (not mine and fewer < wish.bounds.least):
        if now.pods:
            return QueueDecision(standing=away)
        last = DeleteWorkload(workload=smaller) if smaller else ReleaseQuota(workload=one)
        return QueueDecision(standing=away, action=last)
    if smaller is None:
        return QueueDecision(standing=_shrunk(one, fewer, wish), action=CreateWorkload(seats=fewer, replaces=one))
    if not mine:
        return QueueDecision(standing=_shrunk(one, fewer, wish), action=DeleteWorkload(workload=smaller))
    standing = _shrunk(one, smaller.asked, wish)
    if smaller.asked < one.held:
        if now.pods <= smaller.asked + wish.bounds.standby:
            return QueueDecision(standing=standing, action=ResizeWorkload(workload=one, seats=smaller.asked))
        left = wish.leave_seconds - waited.get(smaller.name, 0.0)
        return QueueDecision(standing=standing, due=left) if left > 0 else QueueDecision(standing=away)
    left = ENOUGH_SECONDS - min(waited.get(smaller.name, 0.0), waited.get(one.name, 0.0))
    if left > 0:
        return QueueDecision(standing=standing, due=left)
    if fewer >= wish.bounds.least:
        return QueueDecision(standing=standing, action=ResizeWorkload(workload=smaller, seats=fewer))
    return QueueDecision(standing=away)


def _seated(one: SeenWorkload, seats: int) -> QueueStanding:
    """With so many of that one's seats."""
    return QueueStanding(
        seats=seats,
        sets=one.spread(seats),
        spare=one.spare,
        flavors=one.flavors,
        domains=one.domains,
        pools=one.pools,
        workload=one.name,
    )


def _taken_away(why: WorkloadCondition) -> QueueStanding:
    if why.reason == PREEMPTED:
        return QueueStanding(seats=0, reason="QuotaPreempted", message=why.message)
    if why.reason.startswith(DEACTIVATED):
        return QueueStanding(seats=0, reason="QueueDeactivated", message=why.message)
    return QueueStanding(seats=0, reason="QueueEvicted", message=f"{why.reason}: {why.message}")


def _shrunk(one: SeenWorkload, seats: int, wish: QueueWish) -> QueueStanding:
    message = f"{seats} of {wish.bounds.most} workers stay, for the queue takes others back"
    told = one.conditions["Evicted"].message
    message = f"{message}: {told}" if told else message
    return replace(_seated(one, seats), reason="QuotaPreempted", message=message)
