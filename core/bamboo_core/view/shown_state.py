"""A job's state as a word and a sentence, for the page, the command line and the Python API. Pure."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from bamboo_core.coordinator.events import Outcome, Status
from bamboo_core.coordinator.protection import OFF, counts_nodes, protection
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.planning.plan import WorkerId

OVER = "Over"  # the phase of a status
MOST_SLOW = 3  # workers in a sentence
TONES = {"Running": "good", "Complete": "good", "Failed": "bad", "Invalid": "bad", "Degraded": "warn"}
CONDITIONS = {
    "Invalid": "Accepted",
    "Pending": "WorkersReady",
}  # that explain a state; others are explained by their own
SENTENCES = {
    "Pending": "Waiting for enough workers to start.",
    "Recovering": "The coordinator was restarted and waits for the workers to come back.",
    "Restoring": "The job goes back to a checkpoint.",
    OVER: "The job is over.",
}


class ShownState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of a job, in a word and a sentence."""

    name: str
    tone: str  # good, warn, bad or idle
    sentence: str
    over: bool = False  # nothing will change any more


def ended(outcome: Outcome, message: str) -> ShownState:
    """Return the state of a run that has ended."""
    tones = {Outcome.COMPLETE: "good", Outcome.INTERRUPTED: "idle"}
    return ShownState(name=outcome.value, tone=tones.get(outcome, "bad"), sentence=message, over=True)


def state_in_status(written: BambooJobStatus) -> ShownState:
    """Return the job's state from its status; a job without status is new."""
    name = written.state
    found = written.condition(CONDITIONS.get(name, name))
    sentence = found.message if found else ""
    over = name in ("Complete", "Failed")
    return ShownState(name=name, tone=TONES.get(name, "idle"), sentence=sentence, over=over)


def live_state(status: Status, spec: JobSpec) -> ShownState:
    """Return the job's state from its coordinator's status."""
    if status.phase != "Running":
        tone = "idle" if status.phase in ("Pending", OVER) else "warn"
        return ShownState(name=status.phase, tone=tone, sentence=SENTENCES.get(status.phase, ""))
    cells = Counter(owner for row in status.grid for owner, _ in row)
    if lost := sorted(cells.keys() - dict(status.workers)):
        sentence = f"The work of {_names(spec, lost)} is being taken over."
        return ShownState(name="Recovering", tone="warn", sentence=sentence)
    found = protection(status, spec)
    if not found.holds and found.reason != OFF:
        return ShownState(name="Degraded", tone="warn", sentence=f"Training continues; {found.message}.")
    if doubled := [worker for worker, number in cells.items() if number > 1]:
        sentence = f"Training continues; {_names(spec, doubled)} does the work of more than one stage."
        return ShownState(name="Degraded", tone="warn", sentence=sentence)
    if status.slow:
        sentence = f"Training continues, held up: {'; '.join(one.sentence for one in status.slow[:MOST_SLOW])}."
        return ShownState(name="Running", tone="warn", sentence=sentence)
    if not found.holds:
        return ShownState(name="Running", tone="good", sentence=f"Training continues, not protected: {found.message}.")
    held = "on at least two nodes" if counts_nodes(spec) else "by at least two workers"
    return ShownState(name="Running", tone="good", sentence=f"Every stage is held {held}.")


def _names(spec: JobSpec, workers: Sequence[WorkerId]) -> str:
    """Return the workers' names without the job's."""
    return ", ".join(worker.removeprefix(f"{spec.name}-") for worker in workers)
