"""The way from what the operator knows of a BambooJob to the document of its page. Pure; the time comes in."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from bamboo_core.coordinator.events import Status
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import USUAL_STEPS, JobSpec, storage_place
from bamboo_core.page import document as d
from bamboo_core.page.builder import Labels, document, history_fields, rows, state
from bamboo_core.page.forecast import at_the_end
from bamboo_core.page.history import JobHistory
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.job_view import JobView
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


def page_document(view: JobView, now: float) -> d.Document:
    """The page of that job."""
    began = _unix(view.written.get("startTime"))
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
    written = dict(counts_so_far(view.written, found.counts))
    unknown = list(found.unknown)
    if view.record is None and view.written.get("training"):
        unknown.append(NOT_SEEN)
    elif began is not None and since is not None and began < since - LATE_SECONDS:
        unknown.append(RESTARTED)
    return _replace(
        found,
        counts=d.PageCounts(**written),
        evaluation=found.evaluation or evaluation_in_status(view),
        checkpoint=checkpoint(view, found.checkpoint),
        cost=cost(view, found.progress.eta_seconds),
        conditions=conditions(view.written),
        unknown=tuple(unknown),
    )


def counts_so_far(written: Mapping[str, Any], counts: d.PageCounts) -> Mapping[str, Any]:
    """The coordinator counts from its own start; the status has counted on, and neither falls."""
    of_status = {name: _count(written, name) for name in ("preemptions", "takeovers", "restarts")}
    return {
        "preemptions": max(counts.preemptions, of_status["preemptions"]),
        "takeovers": max(counts.takeovers, of_status["takeovers"]),
        "restarts": max(counts.restarts or 0, of_status["restarts"]),
        "notices": counts.notices if counts.preemptions >= of_status["preemptions"] else None,
    }


def evaluation_in_status(view: JobView) -> d.PageEvaluation | None:
    """The newest evaluation as the status remembers it, of a job whose coordinator is new or gone."""
    known = (view.written.get("training") or {}).get("evaluation")
    wanted = view.spec.training.evaluation if view.spec else None
    if known is None or wanted is None:
        return None
    return d.PageEvaluation(
        step=known["step"],
        metric=wanted.metric,
        metrics=known["metrics"],
        best_step=known.get("bestStep"),
        best_metrics=known.get("bestMetrics"),
    )


def checkpoint(view: JobView, live: d.PageCheckpoint | None) -> d.PageCheckpoint | None:
    """The checkpoints of a job, for its page; None if it keeps none. live: as the coordinator has it; the status
    outlasts coordinators, and adds up what they count.
    """
    if view.spec is None or view.spec.checkpoint is None:
        return None
    spec, newest = view.spec.checkpoint, view.written.get("checkpoint") or {}
    known = live or d.PageCheckpoint(
        place=storage_place(spec.storage.uri, spec.storage.claim_name), every_steps=spec.every_steps or USUAL_STEPS
    )
    if known.at is None:
        step = newest.get("lastStep", known.step)
        known = _replace(known, step=step, at=_unix(newest.get("lastTime")))
    price = (view.written.get("cost") or {}).get("repeated")
    so_far = view.facts.earlier.repeated_cost + view.facts.repeated_cost
    repeated = _count(view.written, "repeatedSteps")
    return _replace(
        known,
        restores=max(known.restores, _count(view.written, "restores")),
        repeated=max(known.repeated, repeated),
        repeated_seconds=known.repeated_seconds if known.repeated >= repeated else None,
        repeated_cost=None if price is None else float(max(so_far, Decimal(str(price)))),
    )


def _live(view: JobView, job: d.PageJob, now: float, status: Status, spec: JobSpec, record: JobHistory) -> d.Document:
    """A job with a coordinator here."""
    shown = state_in_status(view)
    if not shown.over and status.phase in ("Running", "Recovering"):
        shown = state(status, spec, Labels(view.name))
    found = document(job, spec, status, record, now=now, ended=shown)
    if status.phase == "Recovering" and not found.grid:  # after a restart, until the workers are back
        return _replace(found, **_remembered(view, found.progress))
    return found


def _from_status(view: JobView, job: d.PageJob, now: float) -> d.Document:
    """A job without a coordinator: invalid, suspended, over, or only just seen."""
    names = Labels(view.name)
    steps = view.spec.training.known_steps if view.spec else None
    nothing = d.PageProgress(samples=view.spec.training.global_batch_size if view.spec else None, steps=steps)
    counts = d.PageCounts(preemptions=_count(view.written, "preemptions"), takeovers=_count(view.written, "takeovers"))
    found = d.Document(
        now=now,
        job=job,
        state=state_in_status(view),
        progress=nothing,
        counts=counts,
        epoch=view.written.get("epoch"),
    )
    if view.record:
        found = _replace(found, **history_fields(view.record, names))
    else:
        found = _replace(found, marks=_last_takeover(view.written, names))
    return _replace(found, **_remembered(view, nothing))


def _remembered(view: JobView, progress: d.PageProgress) -> Mapping[str, Any]:
    """Progress and owners as the BambooJob's status has them."""
    training = view.written.get("training") or {}
    over = state_in_status(view).over
    owners = () if over else rows(_owners(view.written.get("plan")), Labels(view.name))
    known = d.PageProgress(
        step=training.get("step", progress.step),
        steps=training.get("steps", progress.steps),
        stopped_early=training.get("stoppedEarly", ""),
        grid_choice=training.get("gridChoice", ""),
        done_by=training.get("doneBy", ""),
        loss=training.get("loss", progress.loss),
        samples=progress.samples,
        samples_per_second=None if over else training.get("samplesPerSecond"),
        eta_seconds=None if over else training.get("etaSeconds"),
    )
    return {"progress": known, "grid": owners, "unknown": (OWNERS_ONLY,) if owners else ()}


def state_in_status(view: JobView) -> d.PageState:
    """The job's state as the status says it; a job without one has only just been seen."""
    name = str(view.written.get("state") or "Pending")
    kind = CONDITIONS.get(name, name)
    found: Mapping[str, Any] = next((c for c in view.written.get("conditions") or () if c.get("type") == kind), {})
    sentence = str(found.get("message") or "")
    over = name in ("Complete", "Failed")
    return d.PageState(name=name, tone=TONES.get(name, "idle"), sentence=sentence, over=over)


def conditions(written: Mapping[str, Any]) -> tuple[d.PageCondition, ...]:
    return tuple(
        d.PageCondition(
            type=str(c.get("type")),
            status=str(c.get("status")),
            reason=str(c.get("reason") or ""),
            message=str(c.get("message") or ""),
            at=_unix(c.get("lastTransitionTime")),
        )
        for c in written.get("conditions") or ()
    )


def cost(view: JobView, seconds_left: float | None) -> d.PageCost | None:
    """The cost of a job; None without pools: then there is nothing that could have a price. seconds_left: until the
    last step. Workers of a job that is over or suspended are as good as gone, as in its status.

    Workers of a job that is over or suspended are as good as gone, as in its status.
    """
    pools = view.facts.pools
    if not pools:
        return None
    written, facts = view.written.get("cost") or {}, view.facts
    idle = state_in_status(view).over or facts.suspended
    paid = {} if idle else facts.paid if facts.paid is not None else facts.pods
    per_hour = price_per_hour(pools, paid)
    total = max(facts.earlier.cost + facts.cost, Decimal(str(written.get("total") or 0)))
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
    found: d.PageCost, view: JobView, pools: Sequence[NodePool], paid: Mapping[str, int], seconds_left: float | None
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


def _last_takeover(written: Mapping[str, Any], names: Labels) -> tuple[d.PageMark, ...]:
    last = written.get("lastTakeover")
    at = _unix(last.get("time")) if last else None
    if not last or at is None:
        return ()
    phases = d.TakeoverPhases(
        victim=names(str(last.get("victim"))),
        worker=names(str(last.get("worker"))),
        pipeline=int(last.get("pipeline") or 0),
        stage=int(last.get("stage") or 0),
        pause=1000 * float(last.get("pauseSeconds") or 0),
    )
    return (d.PageMark(at=at, kind="takeover", message="", takeover=phases),)


def _owners(plan: Any) -> list[list[str]]:
    """Leniently, for the status may have been written by another version, or by hand."""
    try:
        found = json.loads(plan)["pipelines"] if isinstance(plan, str) else []
        return [[str(owner) for owner in row] for row in found]
    except (ValueError, TypeError, KeyError):
        return []


def _count(written: Mapping[str, Any], name: str) -> int:
    return int(written.get(name) or 0)


def _unix(text: Any) -> float | None:
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None


def _replace(struct: T, **changes: Any) -> T:
    return msgspec.structs.replace(struct, **changes)
