"""The way from what the operator knows of a BambooJob to the document of its page. Pure; the time comes in."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from bamboo_core.coordinator.events import Status
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import USUAL_STEPS, JobSpec, storage_place
from bamboo_core.job.status import BambooJobStatus, TrainingProgress
from bamboo_core.page import document as d
from bamboo_core.page.builder import Labels, document, history_fields, rows, state
from bamboo_core.page.forecast import at_the_end
from bamboo_core.page.history import JobHistory
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.operated_job import OperatedJob
from bamboo_operator.status.savings import on_demand_per_hour, on_demand_pool

T = TypeVar("T", d.Document, d.PageCost, d.PageCheckpoint)

LATE_SECONDS = 2.0  # a start so much before the record is not the one that the record saw
TONES = {"Running": "good", "Complete": "good", "Failed": "bad", "Invalid": "bad", "Degraded": "warn"}
CONDITIONS = {
    "Invalid": "Accepted",
    "Saving": "Running",
    "Pending": "WorkersReady",
}  # that explain a state, else its own
NO_PRICE = "No price is given: set pricePerHour in the job's nodePools."
NO_ON_DEMAND = "No pool with capacity OnDemand has a price, so there is nothing to compare with."
RESTARTED = (
    "The operator has been restarted since the job began: curves, timeline and events from before are not known here;"
    " the counts are from the BambooJob's status."
)
NOT_SEEN = (
    "The job was not run by this operator process: curves, timeline, memory and events are not known here; the rest is"
    " from the BambooJob's status."
)
OWNERS_ONLY = "Who runs which stage is as the status has it; what the workers are doing is not known at the moment."


def page_document(view: OperatedJob, now: float) -> d.Document:
    """The page of that job."""
    began = _unix(view.written.start_time)
    since = view.record.since if view.record else None
    job = d.PageJob(
        name=view.name,
        namespace=view.namespace,
        place="cluster",
        mode=view.spec.redundancy.mode.value if view.spec else None,
        began=began,
        since=since,
    )
    if view.status and view.spec and view.record:
        found = _live(view, job, now, view.status, view.spec, view.record)
    else:
        found = _from_status(view, job, now)
    unknown = list(found.unknown)
    if view.record is None and view.written.training != TrainingProgress():
        unknown.append(NOT_SEEN)
    elif began is not None and since is not None and began < since - LATE_SECONDS:
        unknown.append(RESTARTED)
    return _replace(
        found,
        counts=counts_so_far(view.written, found.counts),
        evaluation=found.evaluation or evaluation_in_status(view),
        checkpoint=checkpoint(view, found.checkpoint),
        cost=cost(view, found.progress.eta_seconds),
        conditions=conditions(view.written),
        unknown=tuple(unknown),
    )


def counts_so_far(written: BambooJobStatus, counts: d.PageCounts) -> d.PageCounts:
    """The coordinator counts from its own start; the status has counted on, and neither falls."""
    return d.PageCounts(
        preemptions=max(counts.preemptions, written.preemptions),
        takeovers=max(counts.takeovers, written.takeovers),
        restarts=max(counts.restarts or 0, written.restarts),
        notices=counts.notices if counts.preemptions >= written.preemptions else None,
    )


def evaluation_in_status(view: OperatedJob) -> d.PageEvaluation | None:
    """The newest evaluation as the status remembers it, of a job whose coordinator is new or gone."""
    known = view.written.training.evaluation
    wanted = view.spec.training.evaluation if view.spec else None
    if known is None or wanted is None:
        return None
    return d.PageEvaluation(
        step=known.step,
        metric=wanted.metric,
        metrics=known.metrics,
        best_step=known.best_step,
        best_metrics=known.best_metrics,
    )


def checkpoint(view: OperatedJob, live: d.PageCheckpoint | None) -> d.PageCheckpoint | None:
    """The checkpoints of a job, for its page; None if it keeps none. live: as the coordinator has it; the status
    outlasts coordinators, and adds up what they count.
    """
    if view.spec is None or view.spec.checkpoint is None:
        return None
    spec, written = view.spec.checkpoint, view.written
    known = live or d.PageCheckpoint(
        place=storage_place(spec.storage.uri, spec.storage.claim_name), every_steps=spec.every_steps or USUAL_STEPS
    )
    if known.at is None:
        newest = written.checkpoint
        step = known.step if newest.last_step is None else newest.last_step
        known = _replace(known, step=step, at=_unix(newest.last_time))
    so_far = view.facts.earlier.repeated_cost + view.facts.repeated_cost
    price = written.cost.repeated
    return _replace(
        known,
        restores=max(known.restores, written.restores),
        repeated=max(known.repeated, written.repeated_steps),
        repeated_seconds=known.repeated_seconds if known.repeated >= written.repeated_steps else None,
        repeated_cost=None if price is None else float(max(so_far, Decimal(price))),
    )


def _live(
    view: OperatedJob, job: d.PageJob, now: float, status: Status, spec: JobSpec, record: JobHistory
) -> d.Document:
    """A job with a coordinator here."""
    shown = state_in_status(view)
    if not shown.over and status.phase in ("Running", "Recovering"):
        shown = state(status, spec, Labels(view.name))
    found = document(job, spec, status, record, now=now, ended=shown)
    if status.phase == "Recovering" and not found.grid:  # after a restart, until the workers are back
        return _replace(found, **_remembered(view, found.progress))
    return found


def _from_status(view: OperatedJob, job: d.PageJob, now: float) -> d.Document:
    """A job without a coordinator: invalid, suspended, over, or only just seen."""
    names = Labels(view.name)
    steps = view.spec.training.known_steps if view.spec else None
    nothing = d.PageProgress(samples=view.spec.training.global_batch_size if view.spec else None, steps=steps)
    counts = d.PageCounts(preemptions=view.written.preemptions, takeovers=view.written.takeovers)
    found = d.Document(
        now=now,
        job=job,
        state=state_in_status(view),
        progress=nothing,
        counts=counts,
        epoch=view.written.epoch or None,
    )
    if view.record:
        found = _replace(found, **history_fields(view.record, names))
    else:
        found = _replace(found, marks=_last_takeover(view.written, names))
    return _replace(found, **_remembered(view, nothing))


def _remembered(view: OperatedJob, progress: d.PageProgress) -> Mapping[str, Any]:
    """Progress and owners as the BambooJob's status has them."""
    training = view.written.training
    over = state_in_status(view).over
    owners = () if over else rows(view.written.owners, Labels(view.name))
    known = d.PageProgress(
        step=progress.step if training.step is None else training.step,
        steps=progress.steps if training.steps is None else training.steps,
        stopped_early=training.stopped_early or "",
        grid_choice=training.grid_choice or "",
        done_by=training.done_by or "",
        loss=progress.loss if training.loss is None else training.loss,
        samples=progress.samples,
        samples_per_second=None if over else training.samples_per_second,
        eta_seconds=None if over else training.eta_seconds,
    )
    return {"progress": known, "grid": owners, "unknown": (OWNERS_ONLY,) if owners else ()}


def state_in_status(view: OperatedJob) -> d.PageState:
    """The job's state as the status says it; a job without one has only just been seen."""
    name = view.written.state
    found = view.written.condition(CONDITIONS.get(name, name))
    sentence = found.message if found else ""
    over = name in ("Complete", "Failed")
    return d.PageState(name=name, tone=TONES.get(name, "idle"), sentence=sentence, over=over)


def conditions(written: BambooJobStatus) -> tuple[d.PageCondition, ...]:
    return tuple(
        d.PageCondition(
            type=c.type, status=c.status, reason=c.reason, message=c.message, at=_unix(c.last_transition_time)
        )
        for c in written.conditions
    )


def cost(view: OperatedJob, seconds_left: float | None) -> d.PageCost | None:
    """The cost of a job; None without pools: then there is nothing that could have a price. seconds_left: until the
    last step. Workers of a job that is over or suspended are as good as gone, as in its status.

    Workers of a job that is over or suspended are as good as gone, as in its status.
    """
    pools = view.facts.pools
    if not pools:
        return None
    facts = view.facts
    idle = state_in_status(view).over or facts.suspended
    paid = {} if idle else facts.paid if facts.paid is not None else facts.pods
    per_hour = price_per_hour(pools, paid)
    total = max(facts.earlier.cost + facts.cost, Decimal(view.written.cost.total or 0))
    if per_hour is None and not total:
        return d.PageCost(sentence=NO_PRICE)
    left = None if idle or per_hour is None else seconds_left
    found = d.PageCost(
        total=float(total),
        per_hour=None if per_hour is None else float(per_hour),
        at_end=at_the_end(float(total), float(per_hour or 0), left),
        pools=tuple(
            d.PoolCost(
                name=pool.name,
                capacity=pool.capacity.value,
                workers=paid.get(pool.name, 0),
                price=None if pool.price_per_hour is None else f"{pool.price_per_hour:f}",
            )
            for pool in pools
        ),
    )
    found = _compared(found, view, pools, paid, left)
    return _replace(found, sentence=_what_is_missing(pools, compared=found.on_demand_pool is not None))


def _what_is_missing(pools: Sequence[NodePool], *, compared: bool) -> str:
    """A sentence on the prices that are missing; empty if none is."""
    unpriced = [pool.name for pool in pools if pool.price_per_hour is None]
    if len(unpriced) == len(pools):
        return NO_PRICE
    told = [f"Not included is what has no price: pool {', '.join(unpriced)}."] if unpriced else []
    return " ".join(told if compared else [*told, NO_ON_DEMAND])


def _compared(
    found: d.PageCost, view: OperatedJob, pools: Sequence[NodePool], paid: Mapping[str, int], seconds_left: float | None
) -> d.PageCost:
    """The cost with what was counted for the comparison, also if there is nothing to compare with any more."""
    reference, instead, counted = on_demand_pool(pools), on_demand_per_hour(pools, paid), view.facts.comparison
    if counted.since is not None:
        found = _replace(
            found,
            compared_since=counted.since.timestamp(),
            spent=float(counted.spent),
            on_demand=float(counted.on_demand),
        )
    if reference is None or instead is None:
        return found
    if counted.since is not None:
        at_end = at_the_end((found.total or 0.0) + float(counted.saved), float(instead), seconds_left)
        found = _replace(found, on_demand_at_end=at_end)
    return _replace(found, on_demand_pool=reference.name, on_demand_per_hour=float(instead))


def _last_takeover(written: BambooJobStatus, names: Labels) -> tuple[d.PageMark, ...]:
    last = written.last_takeover
    if last is None or last.time is None:
        return ()
    phases = d.TakeoverPhases(
        victim=names(last.victim),
        worker=names(last.worker),
        pipeline=last.pipeline,
        stage=last.stage,
        pause=1000 * last.pause_seconds,
    )
    return (d.PageMark(at=last.time.timestamp(), kind="takeover", message="", takeover=phases),)


def _unix(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def _replace(struct: T, **changes: Any) -> T:
    return msgspec.structs.replace(struct, **changes)
