"""The rules for a BambooJob's conditions, a pure function for each."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from bamboo_core.coordinator.events import Outcome, Status
from bamboo_core.coordinator.protection import UNHEARD, counts_nodes, crowd, protection
from bamboo_core.job.spec import RedundancyMode, gives_back, whole_workers
from bamboo_core.job.status import ReportedCondition
from bamboo_operator.pods.pools import is_fallback, price_per_hour
from bamboo_operator.pods.queueing import WAITING
from bamboo_operator.pods.rollout import RolloutState
from bamboo_operator.status.budget import date_missed, money_low, money_spent
from bamboo_operator.status.facts import StatusFacts

LONGEST_MESSAGE = 32768


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """The result of a condition's rule: whether the condition holds, with reason and message."""

    holds: bool
    reason: str  # CamelCase
    message: str  # a sentence


@dataclass(frozen=True, slots=True)
class PipelineDamage:
    """A fault in a running pipeline: a worker that runs two stages, or a stage without a second copy."""

    doubled: bool  # a worker runs several stages; False: the stage has no second copy
    message: str


@dataclass(frozen=True, slots=True)
class RuleInput:
    """The input of the rules for conditions: the coordinator's status, the operator's facts, the written conditions."""

    status: Status | None  # None without a coordinator, or while it recovers
    facts: StatusFacts
    previous: Mapping[str, ConditionResult]  # the conditions written before
    # the number of workers in the written status, for a job that gives workers back; else None
    desired: int | None = None

    def was(self, condition: str) -> bool:
        return condition in self.previous and self.previous[condition].holds

    @property
    def over(self) -> bool:
        """Whether the job has ended for good."""
        finish = self.facts.finish
        ended = finish is not None and finish.outcome is not Outcome.INTERRUPTED
        return ended or self.was("Complete") or self.was("Failed")

    @property
    def idle(self) -> ConditionResult | None:
        """The result for a job that intentionally runs nothing: it is over, deleted or suspended; else None."""
        if self.over:
            return ConditionResult(False, "JobOver", "the job is over")
        if self.facts.deleted:
            return ConditionResult(False, "JobDeleted", "the job is being deleted")
        return ConditionResult(False, "Suspended", "the job is suspended") if self.facts.suspended else None

    def ready(self) -> int:
        """Return the number of workers that have loaded their task."""
        return self.status.ready if self.status else 0

    @property
    def pods(self) -> Mapping[str, int]:
        """The number of pods by pool; none for an ended, deleted or suspended job."""
        return {} if self.idle else self.facts.pods

    def per_hour(self) -> Decimal | None:
        """Return the hourly price of the workers that are paid for now; None if no pool has a price."""
        return price_per_hour(self.facts.pools, self.pods if self.idle or self.facts.paid is None else self.facts.paid)

    def damage(self) -> list[PipelineDamage]:
        """Return a fault for each stage that shares its worker and, with redundancy, each one without a second copy."""
        status, spec = self.status, self.facts.spec
        if status is None or spec is None:
            return []
        cells = Counter(owner for row in status.grid for owner, _ in row)
        elsewhere = " on another node" if counts_nodes(spec) else ""
        found = []
        for d, row in enumerate(status.grid):
            for s, (owner, protected) in enumerate(row):
                place = f"stage {s} of pipeline {d}"
                if cells[owner] > 1:
                    found.append(PipelineDamage(True, f"{place} runs on {owner}, which runs another stage, too"))
                if not protected and spec.redundancy.mode is not RedundancyMode.NONE:
                    found.append(PipelineDamage(False, f"{place} has no second copy{elsewhere}"))
        return found


def _accepted(given: RuleInput) -> ConditionResult:
    facts = given.facts
    if facts.problems:
        return ConditionResult(False, "InvalidSpec", "; ".join(facts.problems))
    if facts.refused:
        return ConditionResult(False, "ChangeRefused", facts.refused)
    if warnings := (*facts.warnings, *filter(None, [facts.unmanaged])):
        return ConditionResult(True, "AcceptedInPart", "; ".join(warnings))
    return ConditionResult(True, "Accepted", "; ".join(["the manifest is valid", *facts.surprises]))


def _workers_ready(given: RuleInput) -> ConditionResult:
    spec = given.facts.spec
    if idle := given.idle:
        return idle
    if spec is None:
        return ConditionResult(False, "WorkersPending", "no worker is known yet")
    needed = whole_workers(spec) + spec.standby.workers
    if given.status is None:
        return _as_many_as_pods(given, needed if given.desired is None else min(needed, given.desired))
    if gives_back(spec):
        needed = min(needed, given.status.wanted)
    ready = given.ready()
    message, problems = f"{min(ready, needed)} of {needed} workers are ready", given.facts.startup_problems
    if ready >= needed:
        waits = [problem.message for problem in problems if problem.reason == WAITING]
        return ConditionResult(True, "WorkersReady", "; ".join([message, *waits]))
    reason = problems[0].reason if problems else "WorkersMissing"
    return ConditionResult(False, reason, "; ".join([message, *(problem.message for problem in problems)]))


def _as_many_as_pods(given: RuleInput, needed: int) -> ConditionResult:
    """Return the condition WorkersReady while the coordinator does not know its workers: the last written result if it
    was True, else False. A running job that has a coordinator, but too few pods, gets False, too.
    """
    existing = sum(given.pods.values())
    if given.was("Running") and existing < needed and not given.facts.unattended:
        message = f"{existing} of {needed} workers have a pod; the operator was restarted, and waits for their reports"
        return ConditionResult(False, "WorkersMissing", message)
    if given.was("WorkersReady"):
        return given.previous["WorkersReady"]
    return ConditionResult(False, "WorkersPending", "no worker is known yet")


def _workers_updated(given: RuleInput) -> ConditionResult:
    record = given.facts.rollout
    if idle := given.idle:
        return idle
    if record is None:
        unknown = ConditionResult(False, "WorkersPending", "no worker is known yet")
        return given.previous.get("WorkersUpdated", unknown)
    match record.state:
        case RolloutState.COMPLETE:
            return ConditionResult(True, "WorkersUpdated", f"all workers are of revision {record.revision}")
        case RolloutState.STALLED:
            return ConditionResult(False, "RolloutStalled", record.message)
        case RolloutState.PROGRESSING:
            return ConditionResult(False, "RollingOut", record.message)


def _running(given: RuleInput) -> ConditionResult:
    status = given.status
    if idle := given.idle:
        return idle
    if status is None or status.phase == "Recovering":
        if given.was("Running"):
            return ConditionResult(
                True, "OperatorRestarted", "the workers are training; the operator waits for their reports"
            )
        return ConditionResult(False, "Pending", "the job has not started yet")
    match status.phase:
        case "Running":
            stages = len(status.grid[0]) if status.grid else 0
            return ConditionResult(True, "Training", f"{len(status.grid)} pipeline(s) of {stages} stages train")
        case "Restoring":
            return ConditionResult(False, "Restoring", "the job goes back to a checkpoint")
        case _ if status.grid_choice:
            return ConditionResult(False, "NoGridFits", status.grid_choice)
        case _:
            return ConditionResult(False, "WaitingForWorkers", f"{given.ready()} workers are ready, too few to start")


def _degraded(given: RuleInput) -> ConditionResult:
    status, spec = given.status, given.facts.spec
    if idle := given.idle:
        return idle
    if given.facts.unattended:
        return ConditionResult(
            True, "Unattended", "the workers train, but lost workers are not taken over: see condition Accepted"
        )
    if status is None and given.was("Degraded"):
        return given.previous["Degraded"]
    if status is None or spec is None or not status.grid:
        return ConditionResult(False, "NotRunning", "nothing runs yet")
    damage = given.damage()
    sentences = [d.message for d in damage]
    if status.crowded:
        sentences.append(crowd(status, spec))
    if given.facts.problems or given.facts.refused:
        sentences.append(
            "the workers continue with the last accepted manifest, not with the newest one: see condition Accepted"
        )
    if not sentences:
        return ConditionResult(False, "AsDesired", "every stage has its own worker and its protection")
    unharmed = "Unprotected" if damage or status.crowded else "SpecNotFollowed"
    reason = "WorkersMissing" if any(d.doubled for d in damage) else unharmed
    more = f"; and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return ConditionResult(True, reason, "; ".join(sentences[:3]) + more)


def _protected(given: RuleInput) -> ConditionResult:
    status, spec = given.status, given.facts.spec
    if idle := given.idle:
        return idle
    if status is None and given.facts.unattended:
        return ConditionResult(False, "Unattended", "lost workers are not taken over: see condition Accepted")
    if status is None and given.was("Running"):
        return ConditionResult(False, "OperatorRestarted", UNHEARD)
    if status is None or spec is None:
        return ConditionResult(False, "NotRunning", "nothing runs yet")
    found = protection(status, spec)
    return ConditionResult(found.holds, found.reason, found.message)


def _straggling(given: RuleInput) -> ConditionResult:
    status = given.status
    if idle := given.idle:
        return idle
    if status is None and given.was("Straggling"):
        return given.previous["Straggling"]
    slow = [one.sentence for one in status.slow] if status else []
    if not slow:
        return ConditionResult(False, "NoStraggler", "no worker is known to delay the others")
    more = f"; and {len(slow) - 3} more" if len(slow) > 3 else ""
    return ConditionResult(True, "StragglerFound", "; ".join(slow[:3]) + more)


def _budget_short(given: RuleInput) -> ConditionResult:
    spec, status, before = given.facts.spec, given.status, given.previous.get("BudgetShort")
    if idle := given.idle:
        return idle
    if spec is None or spec.budget is None:
        return ConditionResult(False, "NoBudget", "the job has no budget that it could exhaust")
    if status is None or status.phase != "Running":
        return before or ConditionResult(False, "NotRunning", "nothing runs yet")
    left = status.eta_seconds
    low = money_low(spec, given.facts.cost, given.per_hour(), left)
    missed = date_missed(spec, given.facts.now, left)
    if found := [one for one in (low, missed) if one is not None]:
        return ConditionResult(True, found[0].reason, "; ".join(one.message for one in found))
    if left is None and spec.budget.done_by is not None and before is not None and before.reason == "DateMissed":
        return before  # until the remaining time is known again
    return ConditionResult(False, "WithinBudget", "the budget is not known to be too small")


def _suspended(given: RuleInput) -> ConditionResult:
    if given.facts.suspended and not given.over:
        spec = given.facts.spec
        if (why := money_spent(given.facts)) and spec and not spec.suspend:
            return ConditionResult(True, "BudgetSpent", why)
        return ConditionResult(True, "Suspended", "the job is suspended")
    return ConditionResult(False, "NotSuspended", "the job is not suspended")


def _restoring(given: RuleInput) -> ConditionResult:
    if given.status and given.status.phase == "Restoring" and not given.idle:
        return ConditionResult(True, "Restoring", "the job goes back to a checkpoint")
    return ConditionResult(False, "NotRestoring", "nothing is being restored")


def _fallback(given: RuleInput) -> ConditionResult:
    pools = given.facts.spec.node_pools if given.facts.spec else ()
    used = {name: count for name, count in given.pods.items() if count and is_fallback(pools, name)}
    if not used:
        return ConditionResult(False, "NoFallback", "no worker is in a fallback pool")
    return ConditionResult(
        True, "FallbackPool", "; ".join(f"{n} worker(s) in node pool {name}" for name, n in used.items())
    )


def _complete(given: RuleInput) -> ConditionResult:
    finish = given.facts.finish
    if given.was("Complete"):
        return given.previous["Complete"]
    if finish and finish.outcome is Outcome.COMPLETE and not given.was("Failed"):
        return ConditionResult(True, finish.reason, finish.message)
    return ConditionResult(False, "NotComplete", "not all steps are done")


def _failed(given: RuleInput) -> ConditionResult:
    finish = given.facts.finish
    if given.was("Failed"):
        return given.previous["Failed"]
    if finish and finish.outcome in (Outcome.FAILED, Outcome.UNRECOVERABLE) and not given.was("Complete"):
        return ConditionResult(True, finish.reason, finish.message)
    return ConditionResult(False, "NotFailed", "the job has not failed")


RULES: dict[str, Callable[[RuleInput], ConditionResult]] = {
    "Accepted": _accepted,
    "WorkersReady": _workers_ready,
    "WorkersUpdated": _workers_updated,
    "Running": _running,
    "Degraded": _degraded,
    "Protected": _protected,
    "Straggling": _straggling,
    "BudgetShort": _budget_short,
    "Suspended": _suspended,
    "Restoring": _restoring,
    "FallbackActive": _fallback,
    "Complete": _complete,
    "Failed": _failed,
}


def evaluate(given: RuleInput) -> dict[str, ConditionResult]:
    """Return the result of each condition, in the order of display."""
    return {name: rule(given) for name, rule in RULES.items()}


def condition_results(conditions: Iterable[ReportedCondition]) -> dict[str, ConditionResult]:
    """Return the conditions of a status as results, by type."""
    return {c.type: ConditionResult(c.holds, c.reason or "Unknown", c.message) for c in conditions}


def displayed_state(found: Mapping[str, ConditionResult]) -> str:
    """Return the job's state in one word, by its conditions: Running, Degraded, Failed and so on."""
    for name in ("Failed", "Complete"):
        if found[name].holds:
            return name
    running = found["Running"]
    accepted = found["Accepted"]
    if not accepted.holds and not running.holds:
        return "Invalid"
    if running.reason == "JobDeleted":
        return "Terminating"
    for name in ("Suspended", "Restoring"):
        if found[name].holds:
            return name
    if not running.holds:
        return "Pending"
    return "Degraded" if found["Degraded"].holds else "Running"
