"""The document of a job's page: all job data that reaches the browser, which selects and formats it.

`status` is the job's status in the API's form, `live` the coordinator's; both have their own formats of times. Other
times are Unix seconds. Unknown values are null; sentences in `unknown` tell the user which data is missing.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.budget_reach import date_told
from bamboo_core.job.spec import USUAL_STEPS
from bamboo_core.job.status import BambooJobStatus, TrainingProgress
from bamboo_core.page.timeline import JobTimeline, Point, TimelineMark
from bamboo_core.planning.plan import WorkerId
from bamboo_core.view.job_view import JobView, ShownState

VERSION = 4  # a page that was loaded before an upgrade asks to be reloaded
LATE_SECONDS = 2.0  # a start this much earlier than the record is not the one that the record saw
RESTARTED = (
    "The operator has been restarted since the job began: curves, timeline and events from before are not known here;"
    " the counts are from the BambooJob's status."
)
NOT_SEEN = (
    "The job was not run by this operator process: curves, timeline, memory and events are not known here; the rest is"
    " from the BambooJob's status."
)
OWNERS_ONLY = "Who runs which stage is as the status has it; what the workers are doing is not known at the moment."


class PageJob(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A job's name, settings and epoch for its page, and the start times of the job and its timeline."""

    name: str
    namespace: str
    place: str  # local or cluster
    mode: str
    epoch: int
    samples: int  # per step
    steps: int | None  # to train, if the manifest gives the number
    metric: str | None  # the metric that decides which evaluation is the best
    checkpoints: str  # where they are, without credentials; "" if there are none
    every_steps: int | None  # between two checkpoints
    began: float | None  # when the job started
    since: float | None  # when the record began


class PoolCost(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A node pool: the number of its paid workers, and the price of one."""

    name: str
    capacity: str
    workers: int  # paid for at present
    price: str | None = None  # of one worker per hour, at present


class Document(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Everything that a job's page shows."""

    version: int = VERSION
    now: float
    job: PageJob
    state: ShownState
    status: BambooJobStatus
    live: Status | None  # None without a coordinator that knows the job
    owners: tuple[tuple[WorkerId, ...], ...]  # by pipeline and stage, if there is no such coordinator
    done_by: str  # whether the job will be done by its date
    cost_at_end: float | None
    pools: tuple[PoolCost, ...]
    # points: oldest first; their step falls where the job went back to a checkpoint. marks, events: newest first
    points: tuple[Point, ...]
    marks: tuple[TimelineMark, ...]
    events: tuple[tuple[float, Emit], ...]
    unknown: tuple[str, ...]  # sentences


def encode(document: Document) -> bytes:
    """Return the document as JSON. A number that is not finite becomes null."""
    return msgspec.json.encode(document)


def document(
    view: JobView,
    record: JobTimeline | None,
    *,
    place: str,
    now: float,
    ended: ShownState | None = None,
    pools: Sequence[PoolCost] = (),
) -> Document:
    """Return the document of a job's page. record: the job's timeline; None if this process (operator or CLI) has not
    run it. place: local or cluster. now: Unix seconds. ended: replaces the view's state if the run is over or starting.
    """
    live, spec, written = view.live, view.spec, view.status
    state = ended or view.state
    if live is not None and live.phase == "Recovering" and not live.grid:
        live = None  # until the workers are back the status knows more
    trains = live is not None and live.phase != "Over"
    if live is not None and not trains:  # its last figures are out of date, and an operator's clock for its job stands
        newest = live.checkpoint
        if newest is not None:
            newest = replace(newest, writing=None, age=newest.age if place == "local" else None)
        live = replace(live, checkpoint=newest, eta_seconds=None, samples_per_second=None)
    remembered = () if live is not None or state.over else view.plan
    since = record.since if record is not None else None
    began = written.start_time.timestamp() if written.start_time else since if place == "local" else None
    unknown = [OWNERS_ONLY] if remembered else []
    if record is None and written.training != TrainingProgress():
        unknown.append(NOT_SEEN)
    elif began is not None and since is not None and began < since - LATE_SECONDS:
        unknown.append(RESTARTED)
    kept, evaluation = spec.checkpoint, spec.training.evaluation
    return Document(
        now=now,
        job=PageJob(
            name=view.name,
            namespace=view.namespace,
            place=place,
            mode=((live and live.mode) or spec.redundancy.mode).value,
            epoch=live.epoch if live is not None else written.plan_record.epoch,
            samples=spec.training.global_batch_size,
            steps=spec.training.known_steps,
            metric=evaluation.metric if evaluation else None,
            checkpoints=view.checkpoint_place,
            every_steps=(kept.every_steps or USUAL_STEPS) if kept else None,
            began=began,
            since=since,
        ),
        state=state,
        status=msgspec.structs.replace(written, plan=None, digests=None),
        live=None if live is None else replace(live, losses=(), takeovers=()),  # the record has them
        owners=remembered,
        done_by=date_told(live.done_by, datetime.fromtimestamp(now, UTC), live.eta_seconds) if live and trains else "",
        cost_at_end=view.cost_at_end,
        pools=tuple(pools),
        points=record.curves.points() if record is not None else (),
        marks=tuple(reversed(record.marks)) if record is not None else (),
        events=tuple(reversed(record.events)) if record is not None else (),
        unknown=tuple(unknown),
    )
