"""Is the job protected: could any one of its workers be lost at this moment, and no state with it?

The one answer to that question: the condition Protected, the metric, the page and the terminal all have it from here.
"""

from dataclasses import dataclass

from bamboo.coordinator.events import Status
from bamboo.job.spec import JobSpec, RedundancyMode

OFF = "RedundancyOff"  # the reason of a job that is not meant to be protected
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
        return Protection(True, "InStep", "the state of every stage is held by two workers or more, in step")
    bare = f"{len(alone)} of {len(cells)} stages held by one worker only: {_listed(alone)}"
    if spec.redundancy.mode is RedundancyMode.NONE:
        return Protection(False, OFF, f"redundancy.mode is None; {bare}")
    if set(alone) <= set(status.replicating):
        return Protection(False, "Replicating", f"{bare}; copies are being transferred")
    if len(status.workers) <= 1:
        return Protection(False, "OnlyWorker", f"{bare}; there is no other worker to hold a copy")
    return Protection(False, "WorkersMissing", f"{bare}; workers for the others' copies are missing")


def cell_name(pipeline: int, stage: int) -> str:
    return f"pipeline {pipeline} stage {stage}"


def _listed(cells: list[str]) -> str:
    more = f" and {len(cells) - NAMED} more" if len(cells) > NAMED else ""
    return ", ".join(cells[:NAMED]) + more
