"""Which conditions of a BambooJob hold, and why: one rule for each. Times are not their business."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bamboo.coordinator.events import Outcome, Status, WorkerState
from bamboo.coordinator.protection import protection
from bamboo.job.spec import RedundancyMode
from bamboo_operator.facts import Facts
from bamboo_operator.pools import is_fallback

LONGEST_MESSAGE = 32768


@dataclass(frozen=True, slots=True)
class Verdict:
    """reason: CamelCase; message: a sentence."""

    holds: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a pipeline. doubled: a worker does two workers' work; else state is held only once."""

    pipeline: int
    doubled: bool
    message: str


@dataclass(frozen=True, slots=True)
class Scene:
    """status: of a coordinator that knows the job's plan, or that there is none; None while it does not.

    held: the conditions as they were.
    """

    status: Status | None
    facts: Facts
    held: Mapping[str, Verdict]

    def was(self, condition: str) -> bool:
        return condition in self.held and self.held[condition].holds

    @property
    def over(self) -> bool:
        """Has the job ended, for good?"""
        finish = self.facts.finish
        ended = finish is not None and finish.outcome is not Outcome.INTERRUPTED
        return ended or self.was("Complete") or self.was("Failed")

    @property
    def idle(self) -> Verdict | None:
        """Why nothing runs, if that is meant to be so."""
        if self.over:
            return Verdict(False, "JobOver", "the job is over")
        return Verdict(False, "Suspended", "the job is suspended") if self.facts.suspended else None

    def ready(self) -> int:
        """Workers that have loaded their task."""
        workers = self.status.workers if self.status else ()
        return sum(1 for _, state in workers if state is not WorkerState.STARTING)

    @property
    def pods(self) -> Mapping[str, int]:
        """By pool; those of a job that is over or suspended are as good as gone."""
        return {} if self.idle else self.facts.pods

    def damage(self) -> list[Damage]:
        """Of the pipelines that are there."""
        status, spec = self.status, self.facts.spec
        if status is None or spec is None:
            return []
        cells = Counter(owner for row in status.grid for owner, _ in row)
        found = []
        for d, row in enumerate(status.grid):
            for s, (owner, protected) in enumerate(row):
                place = f"stage {s} of pipeline {d}"
                if cells[owner] > 1:
                    found.append(Damage(d, True, f"{place} runs on {owner}, which runs another stage, too"))
                if not protected and spec.redundancy.mode is not RedundancyMode.NONE:
                    found.append(Damage(d, False, f"{place} has no second copy"))
        return found


def _accepted(scene: Scene) -> Verdict:
    facts = scene.facts
    if facts.problems:
        return Verdict(False, "InvalidSpec", "; ".join(facts.problems))
    if facts.refused:
        return Verdict(False, "ChangeRefused", facts.refused)
    if facts.warnings:
        return Verdict(True, "AcceptedInPart", "; ".join(facts.warnings))
    return Verdict(True, "Accepted", "the manifest is valid")


def _workers_ready(scene: Scene) -> Verdict:
    spec = scene.facts.spec
    if idle := scene.idle:
        return idle
    if spec is None or (scene.status is None and not scene.was("WorkersReady")):
        return Verdict(False, "WorkersPending", "no worker is known yet")
    if scene.status is None:
        return scene.held["WorkersReady"]
    needed, ready = spec.topology.stages * spec.topology.pipelines + spec.standby.workers, scene.ready()
    message, troubles = f"{min(ready, needed)} of {needed} workers are ready", scene.facts.troubles
    if ready >= needed:
        return Verdict(True, "WorkersReady", message)
    reason = troubles[0].reason if troubles else "WorkersMissing"
    return Verdict(False, reason, "; ".join([message, *(trouble.message for trouble in troubles)]))


def _running(scene: Scene) -> Verdict:
    status = scene.status
    if idle := scene.idle:
        return idle
    if status is None or status.phase == "Recovering":
        if scene.was("Running"):
            return Verdict(True, "OperatorRestarted", "the workers are training; the operator waits for their reports")
        return Verdict(False, "Pending", "the job has not started yet")
    match status.phase:
        case "Running":
            stages = len(status.grid[0]) if status.grid else 0
            return Verdict(True, "Training", f"{len(status.grid)} pipeline(s) of {stages} stages train")
        case "Saving":
            return Verdict(True, "Saving", "all steps are done, and the workers save the result")
        case "Restoring":
            return Verdict(False, "Restoring", "the job goes back to a checkpoint")
        case _:
            return Verdict(False, "WaitingForWorkers", f"{scene.ready()} workers are ready, too few to start")


def _degraded(scene: Scene) -> Verdict:
    status, spec = scene.status, scene.facts.spec
    if idle := scene.idle:
        return idle
    if scene.facts.unattended:
        return Verdict(
            True, "Unattended", "the workers train, but lost workers are not taken over: see condition Accepted"
        )
    if status is None and scene.was("Degraded"):
        return scene.held["Degraded"]
    if status is None or spec is None or not status.grid:
        return Verdict(False, "NotRunning", "nothing runs yet")
    damage, missing = scene.damage(), spec.topology.pipelines - len(status.grid)
    told = [d.message for d in damage]
    if missing > 0:
        told.insert(0, f"{missing} of {spec.topology.pipelines} pipelines are missing")
    if scene.facts.problems or scene.facts.refused:
        told.append(
            "the workers continue with the last accepted manifest, not with the newest one: see condition Accepted"
        )
    if not told:
        return Verdict(False, "AsDesired", "every stage has its own worker and its protection")
    unharmed = "Unprotected" if damage else "SpecNotFollowed"
    reason = "WorkersMissing" if any(d.doubled for d in damage) else unharmed
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    return Verdict(True, "PipelinesMissing" if missing > 0 else reason, "; ".join(told[:3]) + more)


def _protected(scene: Scene) -> Verdict:
    status, spec = scene.status, scene.facts.spec
    if idle := scene.idle:
        return idle
    if status is None and "Protected" in scene.held and scene.was("Running"):
        return scene.held["Protected"]
    if status is None or spec is None:
        return Verdict(False, "NotRunning", "nothing runs yet")
    found = protection(status, spec)
    return Verdict(found.holds, found.reason, found.message)


def _suspended(scene: Scene) -> Verdict:
    if scene.facts.suspended and not scene.over:
        return Verdict(True, "Suspended", "the job is suspended")
    return Verdict(False, "NotSuspended", "the job is not suspended")


def _restoring(scene: Scene) -> Verdict:
    if scene.status and scene.status.phase == "Restoring" and not scene.idle:
        return Verdict(True, "Restoring", "the job goes back to a checkpoint")
    return Verdict(False, "NotRestoring", "nothing is being restored")


def _fallback(scene: Scene) -> Verdict:
    pools = scene.facts.spec.node_pools if scene.facts.spec else ()
    used = {name: count for name, count in scene.pods.items() if count and is_fallback(pools, name)}
    if not used:
        return Verdict(False, "NoFallback", "no worker is in a fallback pool")
    return Verdict(True, "FallbackPool", "; ".join(f"{n} worker(s) in node pool {name}" for name, n in used.items()))


def _complete(scene: Scene) -> Verdict:
    finish = scene.facts.finish
    if scene.was("Complete"):
        return scene.held["Complete"]
    if finish and finish.outcome is Outcome.COMPLETE and not scene.was("Failed"):
        return Verdict(True, finish.reason, finish.message)
    return Verdict(False, "NotComplete", "not all steps are done")


def _failed(scene: Scene) -> Verdict:
    finish = scene.facts.finish
    if scene.was("Failed"):
        return scene.held["Failed"]
    if finish and finish.outcome in (Outcome.FAILED, Outcome.UNRECOVERABLE) and not scene.was("Complete"):
        return Verdict(True, finish.reason, finish.message)
    return Verdict(False, "NotFailed", "the job has not failed")


RULES: dict[str, Callable[[Scene], Verdict]] = {
    "Accepted": _accepted,
    "WorkersReady": _workers_ready,
    "Running": _running,
    "Degraded": _degraded,
    "Protected": _protected,
    "Suspended": _suspended,
    "Restoring": _restoring,
    "FallbackActive": _fallback,
    "Complete": _complete,
    "Failed": _failed,
}


def verdicts(scene: Scene) -> dict[str, Verdict]:
    """One for each condition, in the order in which they are shown."""
    return {name: rule(scene) for name, rule in RULES.items()}


def held(conditions: Any) -> dict[str, Verdict]:
    """The conditions in a status, as verdicts."""
    return {
        c["type"]: Verdict(c.get("status") == "True", c.get("reason") or "Unknown", c.get("message") or "")
        for c in conditions or ()
    }


def display(found: Mapping[str, Verdict]) -> str:
    """The conditions in one word."""
    for name in ("Failed", "Complete"):
        if found[name].holds:
            return name
    running = found["Running"]
    if not found["Accepted"].holds and not running.holds:
        return "Invalid"
    for name in ("Suspended", "Restoring"):
        if found[name].holds:
            return name
    if not running.holds:
        return "Pending"
    if running.reason == "Saving":
        return "Saving"
    return "Degraded" if found["Degraded"].holds else "Running"
