"""Is the job protected: could any one of its workers be lost at this moment, and no state with it?

The one answer to that question: the condition Protected, the metric, the page and the terminal all have it from here.
"""

from dataclasses import dataclass

from bamboo.coordinator.events import Status
from bamboo.job.spec import JobSpec, RedundancyMode

OFF = "RedundancyOff"  # the reason of a job that is not meant to be protected
WORKERS = ("one", "two", "three", "four")  # that hold a stage, by the number of its replicas
NAMED = 3  # stages in a sentence; the others are counted


@dataclass(frozen=True, slots=True)
class Protection:
    """reason: CamelCase; message: a sentence."""

    holds: bool
    reason: str
    message: str


def protection(status: Status, spec: JobSpec) -> Protection:
    """Of a job that is neither over nor suspended, as its coordinator sees it."""
    if not status.grid:
        return Protection(False, "NotRunning", "nothing runs yet")
    cells = [(cell_name(d, s), held) for d, row in enumerate(status.grid) for s, (_, held) in enumerate(row)]
    alone = [name for name, held in cells if not held]
    if not alone:
        return _held_by_several(status, spec.redundancy.kept)
    bare = f"{len(alone)} of {len(cells)} stages held by one worker only: {_listed(alone)}"
    if spec.redundancy.mode is RedundancyMode.NONE:
        return Protection(False, OFF, f"redundancy.mode is None; {bare}")
    if set(alone) <= set(status.replicating):
        return Protection(False, "Replicating", f"{bare}; copies are being transferred")
    if len(status.workers) <= 1:
        return Protection(False, "OnlyWorker", f"{bare}; there is no other worker to hold a copy")
    return Protection(False, "WorkersMissing", f"{bare}; workers for the others' copies are missing")


def _held_by_several(status: Status, wanted: int) -> Protection:
    """wanted: replicas; with one of each stage the job is as it should be."""
    has = wanted if status.replicas is None else min(status.replicas, wanted)
    held = f"the state of every stage is held by {WORKERS[max(has, 1)]} workers or more, in step"
    if has >= wanted:
        return Protection(True, "InStep", held)
    why = "others are being filled" if len(status.workers) > wanted else "there are too few workers for more"
    return Protection(True, "FewerReplicas", f"{held}; redundancy.replicas {wanted} asks for {WORKERS[wanted]}, {why}")


def cell_name(pipeline: int, stage: int) -> str:
    return f"pipeline {pipeline} stage {stage}"


def _listed(cells: list[str]) -> str:
    more = f" and {len(cells) - NAMED} more" if len(cells) > NAMED else ""
    return ", ".join(cells[:NAMED]) + more
