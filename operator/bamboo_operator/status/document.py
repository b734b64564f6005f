"""A BambooJob's status: what the coordinator says and what the operator counts, in the shape of the API."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from bamboo_core.coordinator.events import Status, WorkerState
from bamboo_core.job.placement_spec import Capacity
from bamboo_core.job.spec import wanted_pipelines, wanted_workers
from bamboo_core.names import worker_index
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import api_time, exact_time
from bamboo_operator.manifests.worker_pod import selector_of
from bamboo_operator.status.budget import budget_left, warned_of
from bamboo_operator.status.condition_rules import (
    LONGEST_MESSAGE,
    ConditionResult,
    RuleInput,
    condition_results,
    displayed_state,
    evaluate,
)
from bamboo_operator.status.facts import StatusFacts

Json = Mapping[str, Any]

PROGRESS_SECONDS = 15.0
_CENTS = Decimal("0.0001")


def job_status(status: Status | None, previous: Json, facts: StatusFacts) -> dict[str, Any]:
    """The status to be written. status: the coordinator's, None without one; previous: as it was written last.

    What is not known for the moment stays as it was. Computed again from its own result, it does not change.
    """
    given = rule_input(status, previous, facts)
    found = evaluate(given)
    conditions = _conditions(found, previous, facts)
    new = {
        "observedGeneration": facts.generation,
        "conditions": conditions,
        "state": displayed_state(found),
        "epoch": (status.epoch if status else 0) or previous.get("epoch") or 0,
        "pipelines": _pipelines(given, previous),
        "workers": _workers(given, previous),
        "rollout": facts.rollout.written() if facts.rollout else previous.get("rollout"),
        **_counters(status, previous, facts),
        "lastTakeover": _last_takeover(status, previous, facts),
        "training": _training(status, previous, facts),
        "checkpoint": _checkpoint(status, previous, facts),
        "cost": _cost(given),
        "budgetWarnings": _budget_warnings(given, conditions, previous),
        "digests": list(status.digests) if status and status.digests else previous.get("digests"),
        "plan": _plan(status, previous, facts),
        "selector": _selector(given, previous),
    }
    return {key: value for key, value in new.items() if value is not None}


def rule_input(status: Status | None, previous: Json, facts: StatusFacts) -> RuleInput:
    """What the rules of conditions look at."""
    held = (previous.get("workers") or {}).get("desired") if facts.spec and facts.spec.elastic.gives_back else None
    return RuleInput(_known_status(status), facts, condition_results(previous.get("conditions")), held or None)


def _budget_warnings(given: RuleInput, conditions: Sequence[Json], previous: Json) -> list[str] | None:
    short = next((c for c in conditions if c["type"] == "BudgetShort" and c["status"] == "True"), None)
    since = datetime.fromisoformat(short["lastTransitionTime"]) if short else None
    earlier = previous.get("budgetWarnings") or ()
    return warned_of(earlier, given.shortfalls(), since, given.facts.now, given.facts.spec) or None


def _plan(status: Status | None, previous: Json, facts: StatusFacts) -> str | None:
    """The plan to keep. That of a job that is to be suspended stays until its training has ended, for another operator
    to end it.
    """
    if facts.suspended and (status is None or facts.finish is not None):
        return None
    return facts.plan or previous.get("plan")


def worth_writing(new: Json, old: Json, seconds_since_last: float) -> bool:
    """Whether a status is to be written: at once if anything but progress has changed; for progress alone at most every
    15 s.
    """
    if new == old:
        return False
    return seconds_since_last >= PROGRESS_SECONDS or _lasting(new) != _lasting(old)


def _lasting(status: Json) -> Json:
    training, cost = status.get("training") or {}, status.get("cost") or {}
    return {**status, "training": training.get("steps"), "cost": cost.get("perHour")}


def _known_status(status: Status | None) -> Status | None:
    """The status of a coordinator that knows its job; None for one that has just been restarted: it knows no plan and
    no worker yet, though all train.
    """
    return None if status and status.phase == "Recovering" else status


def _conditions(found: Mapping[str, ConditionResult], previous: Json, facts: StatusFacts) -> list[Json]:
    old = {c["type"]: c for c in previous.get("conditions") or ()}
    mine = []
    for kind, result in found.items():
        status, before = str(result.holds), old.get(kind) or {}
        kept = before.get("lastTransitionTime") if before.get("status") == status else None
        mine.append(
            {
                "type": kind,
                "status": status,
                "observedGeneration": facts.generation,
                "lastTransitionTime": kept or facts.time,
                "reason": result.reason,
                "message": result.message[:LONGEST_MESSAGE],
            }
        )
    return mine + [c for kind, c in old.items() if kind not in found]


def _pipelines(given: RuleInput, previous: Json) -> Json:
    spec, status = given.facts.spec, given.status
    if given.idle or spec is None:
        return {"desired": 0, "ready": 0, "degraded": 0}
    desired = {"desired": _desired_pipelines(given, previous)}
    if status is None:
        return {"ready": 0, "degraded": 0, **(previous.get("pipelines") or {}), **desired}
    return {**desired, "ready": len(status.grid), "degraded": len({d.pipeline for d in given.damage()})}


def _desired_pipelines(given: RuleInput, previous: Json) -> int:
    """The pipelines that are desired: those of the grid that runs where the coordinator chooses it."""
    spec, status = given.facts.spec, given.status
    assert spec is not None
    if not spec.elastic.chooses_grid:
        return wanted_pipelines(spec)
    if status is None:
        return (previous.get("pipelines") or {}).get("desired") or wanted_pipelines(spec)
    return len(status.grid) or wanted_pipelines(spec)


def _selector(given: RuleInput, previous: Json) -> str | None:
    """A selector of as many pods as there are ready pipelines: one owner of each, of the first stage if it runs no
    other pipeline.

    An autoscaler counts these pods and sets the number of pipelines. With all workers' pods it would ask for as many
    pipelines as there are workers.
    """
    job, status = given.facts.selector, given.status
    if job is None or (status is None and not given.idle and previous.get("selector")):
        return previous.get("selector")
    chosen: list[WorkerId] = []
    for row in status.grid if status and not given.idle else ():
        owners = [owner for owner, _ in row]
        chosen += [owner for owner in owners if owner not in chosen][:1]
    return selector_of(job, map(worker_index, chosen))


def _workers(given: RuleInput, previous: Json) -> Json:
    spec, status = given.facts.spec, given.status
    idle = given.idle or spec is None
    pools = spec.node_pools if spec else ()
    counts = {c: sum(given.pods.get(p.name, 0) for p in pools if p.capacity is c) for c in Capacity}
    known = {
        "desired": 0 if idle or not spec else status.wanted if status else given.desired or wanted_workers(spec),
        "spot": counts[Capacity.SPOT],
        "onDemand": counts[Capacity.ON_DEMAND],
    }
    if status is None and not idle:
        return {"ready": 0, "standby": 0, **(previous.get("workers") or {}), **known}
    standby = sum(1 for _, state in status.workers if state is WorkerState.STANDBY) if status else 0
    return {**known, "ready": 0 if idle else given.ready(), "standby": 0 if idle else standby}


def _counters(status: Status | None, previous: Json, facts: StatusFacts) -> Json:
    """The counters of the status, which never fall."""
    earlier = facts.earlier
    now = {
        "preemptions": earlier.preemptions + (status.preemptions if status else 0),
        "takeovers": earlier.takeovers + (len(status.takeovers) if status else 0),
        "restores": earlier.restores + (status.checkpoint.restores if status and status.checkpoint else 0),
        "restarts": earlier.restarts + (status.restarts if status else 0),
        "repeatedSteps": earlier.repeated_steps + (status.checkpoint.repeated if status and status.checkpoint else 0),
    }
    return {name: max(count, int(previous.get(name) or 0)) for name, count in now.items()}


def _checkpoint(status: Status | None, previous: Json, facts: StatusFacts) -> Json | None:
    """The newest one that is known; its time is not computed anew.

    A coordinator that knows of none has not looked, or there is none.
    """
    before: Json | None = previous.get("checkpoint")
    known = status.checkpoint if status else None
    if known is None or known.step is None or (before and before.get("lastStep") == known.step):
        return before
    if known.age is None:
        return {"lastStep": known.step}
    return {"lastStep": known.step, "lastTime": api_time(facts.now - timedelta(seconds=known.age))}


def _last_takeover(status: Status | None, previous: Json, facts: StatusFacts) -> Json | None:
    before: Json | None = previous.get("lastTakeover")
    if status is None or not status.takeovers:
        return before
    if before and facts.earlier.takeovers + len(status.takeovers) <= int(previous.get("takeovers") or 0):
        return before
    last = status.takeovers[-1]
    return {
        "time": facts.time,
        "victim": last.victim,
        "worker": last.worker,
        "pipeline": last.pipeline,
        "stage": last.stage,
        "pauseSeconds": round(last.pause_ms / 1000, 3),
    }


def _training(status: Status | None, previous: Json, facts: StatusFacts) -> Json | None:
    """Progress, and whether the job will be done by its date, which is not known of one that is suspended."""
    before: Json = previous.get("training") or {}
    progress = _progress(status, {key: value for key, value in before.items() if key != "doneBy"}, facts)
    told = before.get("doneBy") if status is None else status.date.told if status.date else None
    return progress if progress is None or told is None or facts.suspended else {**progress, "doneBy": told}


def _progress(status: Status | None, before: Json, facts: StatusFacts) -> Json | None:
    if status is None or (before and status.step == 0 and status.loss is None):
        return before or None
    now: dict[str, Any] = {
        "step": status.step,
    }
    if status.steps is not None:
        now |= {"steps": status.steps, "progressPercentage": min(100, 100 * status.step // max(1, status.steps))}
    if status.stopped_early:
        now["stoppedEarly"] = status.stopped_early
    if status.grid_choice:
        now["gridChoice"] = status.grid_choice[:LONGEST_MESSAGE]
    if _finite(status.samples_per_second):
        now["samplesPerSecond"] = round(float(status.samples_per_second or 0), 3)
    if _finite(status.loss):
        now["loss"] = round(float(status.loss or 0), 6)
    if _finite(status.eta_seconds):
        now["etaSeconds"] = max(0, round(status.eta_seconds or 0))
    if status.evaluations:
        now["evaluation"] = _evaluation(status)
    elif "evaluation" in before:
        now["evaluation"] = before["evaluation"]
    reported = before.get("lastReportedTime")
    same = {**now, "lastReportedTime": reported} == before
    return {**now, "lastReportedTime": reported if same and reported else facts.time}


def _evaluation(status: Status) -> Json:
    """The newest one, and the best."""
    step, metrics = status.evaluations[-1]
    told: Json = {"step": step, "metrics": _known(metrics)}
    best = dict(status.evaluations).get(-1 if status.best_evaluation is None else status.best_evaluation)
    return told if best is None else {**told, "bestStep": status.best_evaluation, "bestMetrics": _known(best)}


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if value is not None}


def _finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def _cost(given: RuleInput) -> Json | None:
    facts = given.facts
    per_hour = given.per_hour()
    total, repeated = facts.total_cost, facts.earlier.repeated_cost + facts.repeated_cost
    budget = budget_left(facts.spec, total, None if given.idle else per_hour, given.status)
    if per_hour is None and not total:
        return None
    return {
        **({} if per_hour is None else {"perHour": f"{per_hour or Decimal(0):f}"}),
        "total": f"{total.quantize(_CENTS):f}",
        **({} if budget is None else {"budget": budget}),
        "repeated": f"{repeated.quantize(_CENTS):f}",
        **facts.comparison.written(),
        **({} if facts.counted_until is None else {"countedUntil": exact_time(facts.counted_until)}),
    }
