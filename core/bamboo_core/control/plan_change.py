"""How plans travel: whole to a worker whose channel has carried none yet, and else as what differs from the last one.

A channel keeps the order of what it carries and loses nothing until it breaks, so both of its ends know the last plan
that it has carried without a word about it; a new channel begins with a whole one. Most changes concern a few workers
out of many, and each goes to all of them. Pure, but for what the ends of a channel remember.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from bamboo_core.control.message import Count, Message, to_json
from bamboo_core.job.spec import PipelineSchedule, RedundancyMode
from bamboo_core.planning.plan import MOST_GROUPS, Assignment, CheckpointId, Layout, Peer, Plan, WorkerId

Ranges = tuple[tuple[int, int], ...]
M = TypeVar("M", bound=Message)
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]

# The fields of a plan that a change says as a plan does.
PLAIN: Final = (
    "stages",
    "mode",
    "origin",
    "restore",
    "moved",
    "sources",
    "device_layers",
    "boundary",
    "reason",
    "message",
)


class SendPlan(Message, frozen=True):
    """A whole plan."""

    plan: Plan


class NewLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layout that the plan before has not."""

    generation: Count
    split: tuple[Ranges, ...]  # the microbatches of each pipeline as half-open ranges
    groups: tuple[int, ...] | UnsetType = UNSET  # left out if they are those of the plan before
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B


class PlanChange(Message, frozen=True, omit_defaults=True):
    """A plan as what differs from the last one that this channel has carried; what is left out is as it was there."""

    base: Count  # the epoch of that one
    epoch: Count
    digest: Digest  # of the plan that is made of both
    rows: Count  # how many pipelines it has
    # the pipeline and stage of those with other roles, or that are new
    cells: tuple[tuple[Count, Count, Assignment], ...] = ()
    layouts: tuple[Count | NewLayout, ...] | UnsetType = UNSET  # a number for one that was there, by its generation
    gone: tuple[WorkerId, ...] = ()  # workers that it does not name any more
    peers: tuple[Peer, ...] = ()  # those whose facts differ, and then new ones
    stages: tuple[tuple[int, int], ...] | UnsetType = UNSET
    mode: RedundancyMode | UnsetType = UNSET
    origin: int | UnsetType = UNSET
    restore: CheckpointId | UnsetType | None = UNSET
    moved: bool | UnsetType = UNSET
    sources: tuple[tuple[WorkerId, ...], ...] | UnsetType = UNSET
    device_layers: tuple[tuple[int, int], ...] | UnsetType = UNSET
    boundary: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class WholePlanWanted(Message, frozen=True):
    """The answer to a change that this worker can make nothing of: `problem` says why. The channel's other end sends
    the newest plan again, whole.
    """

    problem: Annotated[str, msgspec.Meta(max_length=400)]


class UnusableChange(ValueError):
    """A change that does not lead to the plan that it is to lead to."""


def plan_digest(plan: Plan) -> str:
    return blake2b(to_json(plan), digest_size=16).hexdigest()


def change_between(base: Plan, plan: Plan) -> PlanChange | None:
    """What `plan` changes of `base`; None if that cannot be said, as workers that stay do not keep their order."""
    peers = _changed_peers(base, plan)
    if peers is None:
        return None
    gone, others = peers
    said: dict[str, Any] = {name: getattr(plan, name) for name in PLAIN if getattr(plan, name) != getattr(base, name)}
    if plan.layouts != base.layouts:
        said["layouts"] = tuple(_layout_said(base, layout) for layout in plan.layouts)
    return PlanChange(
        base=base.epoch,
        epoch=plan.epoch,
        digest=plan_digest(plan),
        rows=len(plan.pipelines),
        cells=tuple(_changed_cells(base, plan)),
        gone=gone,
        peers=others,
        **said,
    )


def _changed_peers(base: Plan, plan: Plan) -> tuple[tuple[WorkerId, ...], tuple[Peer, ...]] | None:
    known = {peer.worker: peer for peer in base.workers}
    gone = tuple(worker for worker in known if plan.peer(worker) is None)
    others = tuple(peer for peer in plan.workers if known.get(peer.worker) != peer)
    return (gone, others) if _with_peers(base.workers, gone, others) == plan.workers else None


def _with_peers(before: Sequence[Peer], gone: Sequence[WorkerId], others: Sequence[Peer]) -> tuple[Peer, ...]:
    if not gone and not others:
        return tuple(before)
    absent, new = frozenset(gone), {peer.worker: peer for peer in others}
    return (*(new.pop(peer.worker, peer) for peer in before if peer.worker not in absent), *new.values())


def _changed_cells(base: Plan, plan: Plan) -> Iterator[tuple[int, int, Assignment]]:
    for pipeline, row in enumerate(plan.pipelines):
        before = base.pipelines[pipeline] if pipeline < len(base.pipelines) else ()
        if row == before:
            continue
        for stage, assignment in enumerate(row):
            if stage >= len(before) or assignment != before[stage]:
                yield pipeline, stage, assignment


def _layout_said(base: Plan, layout: Layout) -> int | NewLayout:
    if layout in base.layouts:
        return layout.generation
    split = tuple(tuple(_ranges(part)) for part in layout.split)
    groups = UNSET if layout.groups == base.target.groups else layout.groups
    return NewLayout(generation=layout.generation, split=split, groups=groups, schedule=layout.schedule)


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open, of numbers in this order."""
    breaks = [at for at, (one, next_one) in enumerate(pairwise(numbers), 1) if next_one != one + 1]
    for first, end in pairwise((0, *breaks, len(numbers))) if numbers else ():
        yield numbers[first], numbers[end - 1] + 1


def changed_plan(base: Plan, change: PlanChange) -> Plan:
    """The plan that a change to another one is. Raises UnusableChange if it is not the one whose digest it says."""
    if change.base != base.epoch:
        raise UnusableChange(f"it is a change to the plan of epoch {change.base}, and here is that of {base.epoch}")
    said = {name: value for name in PLAIN if (value := getattr(change, name)) is not UNSET}
    stages = base.stages if change.stages is UNSET else change.stages
    plan = msgspec.structs.replace(
        base,
        epoch=change.epoch,
        pipelines=_rows(base, change, len(stages)),
        layouts=_layouts(base, change),
        workers=_with_peers(base.workers, change.gone, change.peers),
        **said,
    )
    if plan_digest(plan) != change.digest:
        raise UnusableChange(f"the plan of epoch {change.epoch} comes out as another one")
    return plan


def _rows(base: Plan, change: PlanChange, depth: int) -> tuple[tuple[Assignment, ...], ...]:
    given: dict[int, dict[int, Assignment]] = {}
    for pipeline, stage, assignment in change.cells:
        given.setdefault(pipeline, {})[stage] = assignment
    if change.rows > len(base.pipelines) + len(given):
        raise UnusableChange(f"it does not say who runs each of {change.rows} pipelines")
    return tuple(_row(base, pipeline, given.get(pipeline), depth) for pipeline in range(change.rows))


def _row(base: Plan, pipeline: int, given: dict[int, Assignment] | None, depth: int) -> tuple[Assignment, ...]:
    before = base.pipelines[pipeline] if pipeline < len(base.pipelines) else ()
    if given is None and len(before) == depth:
        return before
    cells = {**dict(enumerate(before)), **(given or {})}
    if not cells.keys() >= set(range(depth)):
        raise UnusableChange(f"it does not say who runs each stage of pipeline {pipeline}")
    return tuple(cells[stage] for stage in range(depth))


def _layouts(base: Plan, change: PlanChange) -> tuple[Layout, ...]:
    if change.layouts is UNSET:
        return base.layouts
    known = {layout.generation: layout for layout in base.layouts}
    found = []
    for said in change.layouts:
        if isinstance(said, NewLayout):
            found.append(_layout(base, said))
        elif said in known:
            found.append(known[said])
        else:
            raise UnusableChange(f"it names the layout of generation {said}, which is not known")
    return tuple(found)


def _layout(base: Plan, said: NewLayout) -> Layout:
    ranges = [one for part in said.split for one in part]
    if any(first < 0 or first >= end for first, end in ranges) or sum(b - a for a, b in ranges) > MOST_GROUPS:
        raise UnusableChange(f"the layout of generation {said.generation} has empty ranges, or too many microbatches")
    split = tuple(tuple(number for first, end in part for number in range(first, end)) for part in said.split)
    groups = base.target.groups if said.groups is UNSET else said.groups
    return Layout(generation=said.generation, split=split, groups=groups, schedule=said.schedule)


class PlanChanges:
    """What the newest plan is to workers that have others. Each change is made once, for all whose channel has carried
    the same plan before.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._made: dict[int, tuple[Plan, SendPlan | PlanChange]] = {}  # by the identity of the plan before

    def after(self, base: Plan, message: SendPlan) -> SendPlan | PlanChange:
        if self._plan is not message.plan:
            self._plan = message.plan
            self._made.clear()
        if id(base) not in self._made:
            self._made[id(base)] = base, change_between(base, message.plan) or message
        return self._made[id(base)][1]


class SentPlans:
    """The coordinator's end of one channel. changes: of the job."""

    def __init__(self, changes: PlanChanges) -> None:
        self._changes = changes
        self._last: SendPlan | None = None

    def said(self, message: Message) -> Message:
        """What is put on the channel for that message; all of them, in this order."""
        if not isinstance(message, SendPlan):
            return message
        last, self._last = self._last, message
        return message if last is None else self._changes.after(last.plan, message)

    def whole(self) -> SendPlan | None:
        """What is put on the channel for WholePlanWanted: the last plan again, if there is one."""
        return self._last


class HeardPlans:
    """The worker's end of one channel."""

    def __init__(self) -> None:
        self._last: Plan | None = None

    def heard(self, message: M) -> M | SendPlan:
        """What a message from the channel is to the worker; all of them, in this order.

        Raises UnusableChange; the worker then says WholePlanWanted.
        """
        if isinstance(message, SendPlan):
            self._last = message.plan
        elif isinstance(message, PlanChange):
            if self._last is None:
                raise UnusableChange("it is a change to a plan that is not here")
            self._last = changed_plan(self._last, message)
            return SendPlan(plan=self._last)
        return message
