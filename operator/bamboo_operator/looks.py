"""From what the operator knows of a BambooJob to the document of its page. Pure; the time comes in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from bamboo.coordinator.events import Status
from bamboo.job.spec import JobSpec, NodePool
from bamboo.page import document as d
from bamboo.page.builder import Labels, document, history_fields, rows, state
from bamboo.page.history import JobHistory
from bamboo_operator.facts import Facts
from bamboo_operator.pools import price_per_hour
from bamboo_operator.savings import on_demand_per_hour, on_demand_pool

T = TypeVar("T", d.Document, d.PageCost)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known of a job. status: of its coordinator, None if there is none; written: the BambooJob's status.

    record: None if no coordinator has run here.
    """

    namespace: str
    name: str
    spec: JobSpec | None
    facts: Facts
    written: Mapping[str, Any] = field(default_factory=dict)
    status: Status | None = None
    record: JobHistory | None = None


def look_document(look: Look, now: float) -> d.Document:
    """The page of that job."""
    began = _unix(look.written.get("startTime"))
    since = look.record.since if look.record else None
    job = d.PageJob(
        name=look.name,
        namespace=look.namespace,
        place="cluster",
        mode=look.spec.redundancy.mode.value if look.spec else None,
        began=began,
        since=since,
    )
    base = _live(look, job, now) if look.status and look.spec and look.record else _from_status(look, job, now)
    written = dict(base_counts(look.written, base.counts))
    unknown = list(base.unknown)
    if look.record is None and look.written.get("training"):
        unknown.append(NOT_SEEN)
    elif began is not None and since is not None and began < since - LATE_SECONDS:
        unknown.append(RESTARTED)
    return _replace(
        base,
        counts=d.PageCounts(**written),
        cost=cost(look),
        conditions=conditions(look.written),
        unknown=tuple(unknown),
    )


def base_counts(written: Mapping[str, Any], counts: d.PageCounts) -> Mapping[str, Any]:
    """The coordinator counts from its own start; the status has counted on, and neither falls."""
    of_status = {name: _count(written, name) for name in ("preemptions", "takeovers", "restarts")}
    return {
        "preemptions": max(counts.preemptions, of_status["preemptions"]),
        "takeovers": max(counts.takeovers, of_status["takeovers"]),
        "restarts": max(counts.restarts or 0, of_status["restarts"]),
        "notices": counts.notices if counts.preemptions >= of_status["preemptions"] else None,
    }


def _live(look: Look, job: d.PageJob, now: float) -> d.Document:
    assert look.spec is not None
    assert look.status is not None
    assert look.record is not None
    shown = written_state(look)
    if not shown.over and look.status.phase in ("Running", "Recovering"):
        shown = state(look.status, look.spec, Labels(look.name))
    found = document(job, look.spec, look.status, look.record, now=now, ended=shown)
    if look.status.phase == "Recovering" and not found.grid:  # NB: after a restart, until the workers are back
        return _replace(found, **_remembered(look, found.progress))
    return found


def _from_status(look: Look, job: d.PageJob, now: float) -> d.Document:
    """A job without a coordinator: invalid, suspended, over, or only just seen."""
    names = Labels(look.name)
    steps = look.spec.training.steps if look.spec else None
    nothing = d.PageProgress(samples=look.spec.training.global_batch_size if look.spec else None, steps=steps)
    counts = d.PageCounts(preemptions=_count(look.written, "preemptions"), takeovers=_count(look.written, "takeovers"))
    found = d.Document(
        now=now, job=job, state=written_state(look), progress=nothing, counts=counts, epoch=look.written.get("epoch"),
    )  # fmt: skip
    if look.record:
        found = _replace(found, **history_fields(look.record, names))
    else:
        found = _replace(found, marks=_last_takeover(look.written, names))
    return _replace(found, **_remembered(look, nothing))


def _remembered(look: Look, progress: d.PageProgress) -> Mapping[str, Any]:
    """Progress and owners as the BambooJob's status has them."""
    training = look.written.get("training") or {}
    over = written_state(look).over
    owners = () if over else rows(_owners(look.written.get("plan")), Labels(look.name))
    known = d.PageProgress(
        step=training.get("step", progress.step),
        steps=training.get("steps", progress.steps),
        loss=training.get("loss", progress.loss),
        samples=progress.samples,
        samples_per_second=None if over else training.get("samplesPerSecond"),
        eta_seconds=None if over else training.get("etaSeconds"),
    )
    return {"progress": known, "grid": owners, "unknown": (OWNERS_ONLY,) if owners else ()}


def written_state(look: Look) -> d.PageState:
    """As the status says it; a job without one has only just been seen."""
    name = str(look.written.get("state") or "Pending")
    kind = CONDITIONS.get(name, name)
    found: Mapping[str, Any] = next((c for c in look.written.get("conditions") or () if c.get("type") == kind), {})
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


def cost(look: Look) -> d.PageCost | None:
    """None without pools: then there is nothing that could have a price."""
    pools = look.spec.node_pools if look.spec else ()
    if not pools:
        return None
    written = look.written.get("cost") or {}
    over = written_state(look).over
    paid = {} if over else look.facts.paid if look.facts.paid is not None else look.facts.pods
    per_hour = price_per_hour(pools, paid)
    if per_hour is None:
        return d.PageCost(sentence=NO_PRICE)
    total = max(look.facts.base.cost + look.facts.cost, Decimal(str(written.get("total") or 0)))
    found = d.PageCost(
        total=float(total),
        per_hour=float(per_hour),
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
    return _compared(found, look, pools, paid)


def _compared(found: d.PageCost, look: Look, pools: Sequence[NodePool], paid: Mapping[str, int]) -> d.PageCost:
    reference, instead = on_demand_pool(pools), on_demand_per_hour(pools, paid)
    if reference is None or instead is None:
        return _replace(found, sentence=NO_ON_DEMAND)
    found = _replace(found, on_demand_pool=reference.name, on_demand_per_hour=float(instead))
    counted = look.facts.comparison
    if counted.since is None:
        return found
    return _replace(
        found,
        compared_since=counted.since.timestamp(),
        spent=float(counted.spent),
        on_demand=float(counted.on_demand),
    )


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
    """NB: the status may have been written by another version, or by hand."""
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
