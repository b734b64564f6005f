"""Who is taken away in a drill, and how the drill went. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bamboo.remote.job_view import phrases
from bamboo.remote.job_view.objects import RemoteWorker
from bamboo_core.kube.errors import RemoteError, UsageError
from bamboo_core.view.job_view import JobView

Json = Mapping[str, Any]

# What each cloud writes on a node that it takes back, for nodes with such a label; the operator knows them all.
TAINTS = (
    ("cloud.google.com/gke-nodepool", "cloud.google.com/impending-node-termination"),
    ("cloud.google.com/gke-spot", "cloud.google.com/impending-node-termination"),
    ("kubernetes.azure.com/scalesetpriority", "cloudprovider.azure.microsoft.com/draining"),
    ("kubernetes.azure.com/cluster", "cloudprovider.azure.microsoft.com/draining"),
)
USUAL_TAINT = "aws-node-termination-handler/spot-itn"
DRILL = "bamboo-drill"  # the taint's value: who put it there


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimChoice:
    """Exactly one of worker, stage and random."""

    worker: str | None = None
    stage: int | None = None
    pipeline: int | None = None
    random: bool = False

    def __post_init__(self) -> None:
        if [self.worker is not None, self.stage is not None, self.random].count(True) != 1:
            raise UsageError("expected one of --worker, --stage and --random")
        if self.pipeline is not None and self.stage is None:
            raise UsageError("--pipeline: expected together with --stage")


def victim(
    job: JobView,
    workers: Sequence[RemoteWorker],
    choice: VictimChoice,
    pick: Callable[[Sequence[RemoteWorker]], RemoteWorker],
) -> RemoteWorker:
    """The worker that the choice means; pick: takes one of several at random. It is alive."""
    if choice.worker is not None:
        return _alive(named(job, workers, choice.worker))
    if choice.random:
        training = [w for w in workers if w.alive and w.cells and w.state != "leaving"]
        if not training:
            raise RemoteError(f"no worker of {job.name} is training")
        return pick(training)
    assert choice.stage is not None
    return _alive(_owner(job, workers, choice.pipeline or 0, choice.stage))


def named(job: JobView, workers: Sequence[RemoteWorker], name: str) -> RemoteWorker:
    """By its whole name, without the job's, or by its number: quickstart-w3, w3, 3."""
    number = name.removeprefix("w")
    found = [w for w in workers if name in (w.name, job.short(w.name))]
    found += [w for w in workers if number.isdecimal() and w.number == int(number)]
    if found:
        return found[0]
    there = ", ".join(job.short(w.name) for w in workers[:20]) or "none"
    more = f" and {len(workers) - 20} more" if len(workers) > 20 else ""
    raise RemoteError(f"{job.name} has no worker {name}; there are: {there}{more}")


def _owner(job: JobView, workers: Sequence[RemoteWorker], pipeline: int, stage: int) -> RemoteWorker:
    if not job.plan:
        raise RemoteError(f"{job.name} has no plan yet; it is {job.status.state}")
    if pipeline >= len(job.plan):
        raise UsageError(f"--pipeline {pipeline}: the job has pipelines 0 to {len(job.plan) - 1} now")
    if stage >= len(job.plan[pipeline]):
        raise UsageError(f"--stage {stage}: the job has stages 0 to {len(job.plan[pipeline]) - 1}")
    owner = job.plan[pipeline][stage]
    found = next((w for w in workers if w.name == owner), None)
    if found is None:
        raise RemoteError(f"{phrases.place((pipeline, stage))} belongs to {owner}, which is gone already")
    return found


def _alive(worker: RemoteWorker) -> RemoteWorker:
    if not worker.alive:
        raise RemoteError(f"{worker.name} has ended already ({worker.detail or worker.state})")
    if worker.state == "leaving":
        raise RemoteError(f"{worker.name} is leaving already")
    return worker


def objections(job: JobView, lost: Sequence[RemoteWorker], *, kill: bool) -> str | None:
    """Why the drill could cost more than a pause; None if nothing speaks against it."""
    protection = job.status.condition("Protected")
    if protection is not None and not job.protected:
        return f"{job.name} is not fully protected ({protection.message}); it could fail"
    if kill and job.spec.redundancy.mode == "None":
        return f"{job.name} has spec.redundancy.mode None: without a notice it will fail"
    taken = {cell for worker in lost for cell in worker.cells}
    if kill and len(job.plan) == 1 and _too_many(taken, len(lost), len(job.plan[0]), job.spec.redundancy.replicas):
        return "neighbouring stages of the only pipeline would be lost at once: without a notice the job will fail"
    return None


def _too_many(taken: set[tuple[int, int]], workers: int, stages: int, replicas: int) -> bool:
    """Could a stage of one pipeline be lost with all its replicas?"""
    together = any((0, (s + 1) % stages) in taken - {(0, s)} for _, s in taken)
    return together and (replicas == 1 or workers > replicas)


# Nodes


def taint_key(node: Json) -> str:
    """What the node's own cloud would write on it."""
    labels = (node.get("metadata") or {}).get("labels") or {}
    return next((taint for label, taint in TAINTS if label in labels), USUAL_TAINT)


def with_taint(node: Json, key: str) -> list[dict[str, Any]]:
    """The node's taints and the drill's. A taint of that key that is no drill's means that the node goes anyway."""
    taints: list[dict[str, Any]] = list((node.get("spec") or {}).get("taints") or ())
    if any(taint.get("key") == key for taint in taints):
        name = node["metadata"]["name"]
        raise RemoteError(f"node {name} has the taint {key} already; kubectl taint node {name} {key}- removes it")
    return [*taints, {"key": key, "value": DRILL, "effect": "NoSchedule"}]


def without_taint(node: Json, key: str) -> list[dict[str, Any]] | None:
    """The node's taints without the drill's; None if it is not there (any more)."""
    taints: list[dict[str, Any]] = list((node.get("spec") or {}).get("taints") or ())
    left = [taint for taint in taints if (taint.get("key"), taint.get("value")) != (key, DRILL)]
    return None if left == taints else left


# What came of it


def out_of_plan(job: JobView, lost: Sequence[RemoteWorker]) -> bool:
    """Does nobody of them run a stage any more?"""
    return not any(job.cells(worker.name) for worker in lost)


def taken_over(job: JobView, before: JobView, lost: Sequence[RemoteWorker]) -> bool:
    """Do others run all their stages, and is the pause known?"""
    return out_of_plan(job, lost) and job.status.takeovers > before.status.takeovers


def whole(job: JobView) -> bool:
    """Does every stage have a worker of its own and a second copy?"""
    return not job.status.holds("Degraded")
