"""Protection of a job: whether any one worker, or any one node, could be lost now without losing state.

Nodes count if they may run several workers each (`spread.workersPerNode`), since a node is lost with all of them; else
workers count one by one. The condition Protected, the metric, the page and the terminal all rely on this module.
Disruption budgets and rolling changes, which take workers one by one, need less: `spares_any_worker`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bamboo_core.coordinator.events import Status
from bamboo_core.job.spec import JobSpec, RedundancyMode

UNHEARD = "not known yet: the operator was restarted, and waits for the workers' reports"
OFF = "RedundancyOff"  # the reason of a job that is not meant to be protected
NUMBERS = ("one", "two", "three", "four")  # words for 1 to 4 holders of a stage, or nodes
NAMED = 3  # stages in a sentence; the others are counted


@dataclass(frozen=True, slots=True)
class Protection:
    """The protection of a job against the loss of any one node or worker. reason: CamelCase. message: for users."""

    holds: bool
    reason: str
    message: str


def protection(status: Status, spec: JobSpec) -> Protection:
    """Return whether an active job could lose any worker (node, if `counts_nodes`) without losing state, and why."""
    if not status.grid:
        return Protection(False, "NotRunning", "nothing runs yet")
    if status.phase == "Recovering":
        return Protection(False, "OperatorRestarted", UNHEARD)
    alone = status.unprotected
    if not alone and status.crowded:
        return Protection(False, "CrowdedNode", crowd(status, spec))
    if not alone:
        return _held_by_several(status, spec)
    where = "on one node only" if counts_nodes(spec) else "by one worker only"
    bare = f"{len(alone)} of {sum(map(len, status.grid))} stages held {where}: {_listed(alone)}"
    if spec.redundancy.mode is RedundancyMode.NONE:
        return Protection(False, OFF, f"redundancy.mode is None; {bare}")
    if set(alone) <= set(status.replicating):
        return Protection(False, "Replicating", f"{bare}; copies are being transferred")
    if status.lacks_room:
        then = "makes the job go back to a checkpoint" if spec.checkpoint else "ends the job"
        text = f"workers have no room for the copies that are asked for; a loss {then}"
        return Protection(False, "NoRoomForCopies", f"{text}; {bare}")
    if len(status.workers) <= 1:
        return Protection(False, "OnlyWorker", f"{bare}; there is no other worker to hold a copy")
    if spares_any_worker(status):
        return Protection(False, "OneNode", f"{bare}; workers on other nodes to hold copies are missing")
    return Protection(False, "WorkersMissing", f"{bare}; workers for the others' copies are missing")


def crowd(status: Status, spec: JobSpec) -> str:
    """Describe the nodes with more workers than `spread.workersPerNode`: name the first NAMED ones, count others."""
    nodes = [f"{number} workers on node {node}" for node, number in status.crowded]
    return f"{_listed(nodes)}, and spread.workersPerNode is {spec.spread.workers_per_node}"


def spares_any_worker(status: Status) -> bool:
    """Return whether any single worker could be lost now without losing state, if other workers on its node stay."""
    return bool(status.replicas)


def counts_nodes(spec: JobSpec) -> bool:
    """Return whether a node may run several workers, so that protection counts nodes instead of workers."""
    return spec.spread.workers_per_node > 1


def _held_by_several(status: Status, spec: JobSpec) -> Protection:
    """Return the protection of a job whose stages are all protected, perhaps with fewer replicas than requested."""
    wanted = spec.redundancy.kept
    has = wanted if status.replicas is None else min(status.replicas, wanted)
    held = f"the state of every stage is held by {NUMBERS[max(has, 1)]} workers or more, in step"
    if status.nodes is not None and counts_nodes(spec):
        held += f", on {NUMBERS[min(status.nodes, max(has, 1) + 1) - 1]} nodes or more"
    elif status.nodes == 1:
        held += ", but of some on one node only"
    if spec.redundancy.mode is RedundancyMode.AUTO and status.mode is RedundancyMode.NONE:
        held += "; redundancy.mode Auto keeps no replicas, as other pipelines have it"
    if has >= wanted:
        return Protection(True, "InStep", held)
    why = "others are being filled" if len(status.workers) > wanted else "there are too few workers for more"
    why = "workers have no room for more" if status.lacks_room else why
    return Protection(True, "FewerReplicas", f"{held}; redundancy.replicas {wanted} asks for {NUMBERS[wanted]}, {why}")


def _listed(things: Sequence[str]) -> str:
    more = f" and {len(things) - NAMED} more" if len(things) > NAMED else ""
    return ", ".join(things[:NAMED]) + more
