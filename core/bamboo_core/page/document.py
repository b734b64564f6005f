"""The document that a job's page is drawn from: the only thing that server and browser share. Times are Unix seconds.

It holds the job's status as the API has it and, in `live`, as the coordinator has it; the browser chooses and formats.
What is not known is null; the sentences in `unknown` say why.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from bamboo_core.coordinator.events import Emit, Outcome, Status
from bamboo_core.coordinator.protection import OFF, counts_nodes, protection
from bamboo_core.job.budget_reach import date_told
from bamboo_core.job.spec import USUAL_STEPS, JobSpec
from bamboo_core.job.status import BambooJobStatus, TrainingProgress
from bamboo_core.page.history import JobHistory, Point, TimelineMark
from bamboo_core.planning.plan import WorkerId
from bamboo_core.view.job_view import JobView

VERSION = 4  # of the document; a page that was loaded before an upgrade asks to be loaded anew
OVER = "Over"  # the phase of a status
MOST_SLOW = 3  # workers in a sentence
LATE_SECONDS = 2.0  # a start so much before the record is not the one that the record saw
TONES = {"Running": "good", "Complete": "good", "Failed": "bad", "Invalid": "bad", "Degraded": "warn"}
CONDITIONS = {
    "Invalid": "Accepted",
    "Saving": "Running",
    "Pending": "WorkersReady",
}  # that explain a state, else its own
RESTARTED = (
    "The operator has been restarted since the job began: curves, timeline and events from before are not known here;"
    " the counts are from the BambooJob's status."
)
NOT_SEEN = (
    "The job was not run by this operator process: curves, timeline, memory and events are not known here; the rest is"
    " from the BambooJob's status."
)
OWNERS_ONLY = "Who runs which stage is as the status has it; what the workers are doing is not known at the moment."
SENTENCES = {
    "Pending": "Waiting for enough workers to start.",
    "Recovering": "The coordinator was restarted and waits for the workers to come back.",
    "Restoring": "The job goes back to a checkpoint.",
    "Saving": "All steps are done; the workers write the weights.",
    OVER: "The job is over.",
}


class PageJob(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a page shows of the manifest, and since when the job is known."""

    name: str
    namespace: str
    place: str  # local or cluster
    mode: str
    epoch: int
    samples: int  # of one step
    steps: int | None  # that are wanted, if the manifest tells
    metric: str | None  # that decides which evaluation is the best
    checkpoints: str  # where they are, without credentials; "" if there are none
    every_steps: int | None  # from one checkpoint to the next
    began: float | None  # when the job did
    since: float | None  # what is told here was seen since then


class PageState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of a job, in a word and a sentence."""

    name: str
    tone: str  # good, warn, bad or idle
    sentence: str
    over: bool = False  # nothing will change any more


class PoolCost(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the workers of a pool cost."""

    name: str
    capacity: str
    workers: int  # those that are paid for now
    price: str | None = None  # of one for an hour, now


class Document(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that a job's page shows."""

    version: int = VERSION
    now: float
    job: PageJob
    state: PageState
    status: BambooJobStatus
    live: Status | None  # None while there is no coordinator that knows the job
    owners: tuple[tuple[WorkerId, ...], ...]  # by pipeline and stage, if there is no such coordinator
    done_by: str  # whether the job will be done by its date
    cost_at_end: float | None
    pools: tuple[PoolCost, ...]
    # the newest first; the step of points falls where the job went back to a checkpoint
    points: tuple[Point, ...]
    marks: tuple[TimelineMark, ...]
    events: tuple[tuple[float, Emit], ...]
    unknown: tuple[str, ...]  # sentences


def encode(document: Document) -> bytes:
    """The document as JSON. A number that is not finite becomes null."""
    return msgspec.json.encode(document)


def document(
    view: JobView,
    record: JobHistory | None,
    *,
    place: str,
    now: float,
    ended: PageState | None = None,
    pools: Sequence[PoolCost] = (),
) -> Document:
    """Return the page of a job. record: None if its shell has not seen it run. ended: how, if its shell knows it."""
    live, spec, written = view.live, view.spec, view.status
    state = ended or _state_now(view)
    if live is not None and live.phase == "Recovering" and not live.grid:
        live = None  # until the workers are back the status says more
    remembered = () if live is not None or state.over else view.plan
    since = record.since if record is not None else None
    began = written.start_time.timestamp() if written.start_time else since if place == "local" else None
    unknown = [OWNERS_ONLY] if remembered else []
    if record is None and written.training != TrainingProgress():
        unknown.append(NOT_SEEN)
    elif began is not None and since is not None and began < since - LATE_SECONDS:
        unknown.append(RESTARTED)
    kept, evaluation = spec.checkpoint, spec.training.evaluation
    return Document(
        now=now,
        job=PageJob(
            name=view.name,
            namespace=view.namespace,
            place=place,
            mode=((live and live.mode) or spec.redundancy.mode).value,
            epoch=live.epoch if live is not None else written.epoch,
            samples=spec.training.global_batch_size,
            steps=spec.training.known_steps,
            metric=evaluation.metric if evaluation else None,
            checkpoints=view.checkpoint_place,
            every_steps=(kept.every_steps or USUAL_STEPS) if kept else None,
            began=began,
            since=since,
        ),
        state=state,
        status=msgspec.structs.replace(written, plan=None, digests=None),
        live=None if live is None else replace(live, losses=(), takeovers=()),  # the record has them
        owners=remembered,
        done_by=date_told(live.done_by, datetime.fromtimestamp(now, UTC), live.eta_seconds) if live else "",
        cost_at_end=view.cost_at_end,
        pools=tuple(pools),
        points=record.curves.points() if record is not None else (),
        marks=tuple(reversed(record.marks)) if record is not None else (),
        events=tuple(reversed(record.events)) if record is not None else (),
        unknown=tuple(unknown),
    )


def ended(outcome: Outcome, message: str) -> PageState:
    """How a run ended."""
    tones = {Outcome.COMPLETE: "good", Outcome.INTERRUPTED: "idle"}
    return PageState(name=outcome.value, tone=tones.get(outcome, "bad"), sentence=message, over=True)


def state_in_status(written: BambooJobStatus) -> PageState:
    """The job's state as the status says it; a job without one has only just been seen."""
    name = written.state
    found = written.condition(CONDITIONS.get(name, name))
    sentence = found.message if found else ""
    over = name in ("Complete", "Failed")
    return PageState(name=name, tone=TONES.get(name, "idle"), sentence=sentence, over=over)


def _state_now(view: JobView) -> PageState:
    """What the coordinator says while the job runs, or while there are no conditions; else what these say."""
    told, live = state_in_status(view.status), view.live
    if live is None or told.over or (view.status.conditions and live.phase not in ("Running", "Recovering")):
        return told
    return live_state(live, view.spec)


def live_state(status: Status, spec: JobSpec) -> PageState:
    """The job's state as its coordinator has it."""
    if status.phase != "Running":
        tone = "idle" if status.phase in ("Pending", OVER) else "warn"
        return PageState(name=status.phase, tone=tone, sentence=SENTENCES.get(status.phase, ""))
    cells = Counter(owner for row in status.grid for owner, _ in row)
    if lost := sorted(cells.keys() - dict(status.workers)):
        sentence = f"The work of {_names(spec, lost)} is being taken over."
        return PageState(name="Recovering", tone="warn", sentence=sentence)
    found = protection(status, spec)
    if not found.holds and found.reason != OFF:
        return PageState(name="Degraded", tone="warn", sentence=f"Training continues; {found.message}.")
    if doubled := [worker for worker, number in cells.items() if number > 1]:
        sentence = f"Training continues; {_names(spec, doubled)} does the work of more than one stage."
        return PageState(name="Degraded", tone="warn", sentence=sentence)
    if status.slow:
        sentence = f"Training continues, held up: {'; '.join(one.told for one in status.slow[:MOST_SLOW])}."
        return PageState(name="Running", tone="warn", sentence=sentence)
    if not found.holds:
        return PageState(name="Running", tone="good", sentence=f"Training continues, not protected: {found.message}.")
    held = "on at least two nodes" if counts_nodes(spec) else "by at least two workers"
    return PageState(name="Running", tone="good", sentence=f"Every stage is held {held}.")


def _names(spec: JobSpec, workers: Sequence[WorkerId]) -> str:
    """The workers' names without the job's."""
    return ", ".join(worker.removeprefix(f"{spec.name}-") for worker in workers)
