"""The view of a job for pages and terminals: its state, progress, cost and plan."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import msgspec

from bamboo_core.coordinator.events import Outcome, Status
from bamboo_core.coordinator.protection import OFF, counts_nodes, protection
from bamboo_core.job.api_object import Metadata, read_api_part, whole_seconds
from bamboo_core.job.fields import MAX_INT64
from bamboo_core.job.manifest import read_spec
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import (
    BambooJobStatus,
    CheckpointStatus,
    EvaluationStatus,
    PipelineCounts,
    PlanRecord,
    TrainingProgress,
    WorkerCounts,
    read_status,
)
from bamboo_core.names import EXIT_FAILED, EXIT_OK, EXIT_UNRECOVERABLE
from bamboo_core.planning.plan import WorkerId
from bamboo_core.storage.url import shown_url

OVER = "Over"  # the phase of a status
MOST_SLOW = 3  # workers in a sentence
TONES = {"Running": "good", "Complete": "good", "Failed": "bad", "Invalid": "bad", "Degraded": "warn"}
CONDITIONS = {
    "Invalid": "Accepted",
    "Pending": "WorkersReady",
}  # the condition that explains a state, if its type is not the state's name
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
    """Return the state of a local run that has ended. message: the sentence to show."""
    tones = {Outcome.COMPLETE: "good", Outcome.INTERRUPTED: "idle"}
    return ShownState(name=outcome.value, tone=tones.get(outcome, "bad"), sentence=message, over=True)


def state_in_status(written: BambooJobStatus) -> ShownState:
    """Return the state in a BambooJob's status, explained by the message of a condition; Pending without a status."""
    name = written.state
    found = written.condition(CONDITIONS.get(name, name))
    sentence = found.message if found else ""
    over = name in ("Complete", "Failed")
    return ShownState(name=name, tone=TONES.get(name, "idle"), sentence=sentence, over=over)


def live_state(status: Status, spec: JobSpec) -> ShownState:
    """Return the state of a job from the present status of its coordinator."""
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
    """Join the workers' names by commas, without the prefix of the job's name."""
    return ", ".join(worker.removeprefix(f"{spec.name}-") for worker in workers)


def run_status(live: Status, now: datetime) -> BambooJobStatus:
    """Build a BambooJob's status from a coordinator's: no conditions, no cost, counts since the coordinator began."""
    kept = live.checkpoint
    return BambooJobStatus(
        state=live.phase,
        pipelines=PipelineCounts(desired=len(live.grid), ready=len(live.grid)),
        workers=WorkerCounts(desired=live.wanted, ready=live.ready),
        preemptions=live.preemptions,
        takeovers=len(live.takeovers),
        restores=kept.counts.restored if kept else 0,
        restarts=live.restarts,
        training=TrainingProgress(
            step=live.step,
            steps=live.steps,
            samples_per_second=_rounded(live.samples_per_second, 3),
            loss=_rounded(live.loss, 6),
            eta_seconds=_whole(live.eta_seconds),
            evaluation=_evaluation(live) if live.evaluations else None,
            last_reported_time=whole_seconds(now),
        ),
        checkpoint=_checkpoint(live, now),
        digests=live.digests or None,
        plan=_plan(live),
    )


def _plan(live: Status) -> str | None:
    """Return the plan's epoch and owners as JSON, not enough for a coordinator to resume; None without a plan."""
    owners = tuple(tuple(owner for owner, _ in row) for row in live.grid)
    return PlanRecord(epoch=live.epoch, pipelines=owners).written() if owners else None


def _checkpoint(live: Status, now: datetime) -> CheckpointStatus:
    known = live.checkpoint
    if known is None or known.step is None:
        return CheckpointStatus()
    time = None if known.age is None else whole_seconds(now - timedelta(seconds=known.age))
    return CheckpointStatus(last_step=known.step, last_time=time)


def _evaluation(live: Status) -> EvaluationStatus:
    """Return the newest evaluation, which must exist, without metrics that are not finite."""
    step, metrics = live.evaluations[-1]
    return EvaluationStatus(step=step, metrics=_known(metrics))


def _known(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if value is not None}


def _rounded(number: float | None, digits: int) -> float | None:
    return round(number, digits) if number is not None and math.isfinite(number) else None


def _whole(seconds: float | None) -> int | None:
    return max(0, round(seconds)) if seconds is not None and abs(seconds) <= MAX_INT64 else None


CellIndex = tuple[int, int]  # pipeline and stage

UNRECOVERABLE = (
    "RestoreDeadlineExceeded",
    "RestoreFailed",
    "StageLost",
    "Suspended",
    "WorkersGone",
)  # reasons of jobs that could not be saved


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job's manifest and status, and the values to show from them. live: the present status of its coordinator if
    available, more complete and exact than `status`.
    """

    metadata: Metadata
    spec: JobSpec
    status: BambooJobStatus
    live: Status | None = None

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def state(self) -> ShownState:
        """The coordinator's state if the job runs, recovers or has no conditions; else the state in `status`."""
        state, live = state_in_status(self.status), self.live
        if live is None or state.over or (self.status.conditions and live.phase not in ("Running", "Recovering")):
            return state
        return live_state(live, self.spec)

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.status.training.step or 0

    @property
    def steps(self) -> int:
        """The number of steps to train; 0 while unknown."""
        return self.status.training.steps or self.spec.training.known_steps or 0

    @property
    def checkpoint_place(self) -> str:
        """The URL of the checkpoints, without credentials; "" if the job keeps none, or if this version cannot read
        their storage.
        """
        return shown_url(self.spec.checkpoint.storage) if self.spec.checkpoint else ""

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The node pools without a price, whose workers are not part of the cost."""
        return tuple(p.name for p in self.spec.node_pools if p.price_per_hour is None)

    @property
    def cost_at_end(self) -> float | None:
        """The job's expected cost until its last step, at the present nodes, prices and speed, in the pools' currency;
        None if unknown, or if the job is over or suspended.
        """
        spent, left = self.status.cost, self.status.training.eta_seconds
        if spent.per_hour is None or left is None or self.status.ended or self.status.holds("Suspended"):
            return None  # a suspended job's speed is outdated
        return float(spent.total or 0) + float(spent.per_hour) * left / 3600

    @property
    def held_back(self) -> str:
        """The operator's message on why it keeps the job suspended although spec.suspend is false, such as a spent
        budget; "" if it does not.
        """
        held = self.status.condition("Suspended")
        if self.spec.suspend or self.status.ended or held is None or not held.holds or held.reason == "Suspended":
            return ""
        return held.message

    @property
    def suspended(self) -> bool:
        return self.spec.suspend or bool(self.held_back)

    @property
    def exit_code(self) -> int | None:
        """The exit code that `bamboo run` would have; None while the job is not over."""
        end = self.status.ended
        if end is None:
            return None
        if end.type == "Complete":
            return EXIT_OK
        return EXIT_UNRECOVERABLE if end.reason in UNRECOVERABLE else EXIT_FAILED

    @property
    def protected(self) -> bool:
        """Whether every stage has its intended protection, if any; True if the status lacks the condition Protected."""
        found = self.status.condition("Protected")
        return found is None or found.holds or found.reason == OFF

    @cached_property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """The workers that own cells, by pipeline and stage; empty while unknown."""
        if self.live is not None and self.live.grid:
            return tuple(tuple(owner for owner, _ in row) for row in self.live.grid)
        return self.status.plan_record.pipelines

    def short(self, worker: str) -> str:
        """Return a worker's name without the prefix of the job's name: w3 for quickstart-w3. Other names stay as is."""
        return worker.removeprefix(f"{self.name}-")

    def cells(self, worker: str) -> tuple[CellIndex, ...]:
        """Return the cells (pipeline, stage) that the worker owns."""
        return tuple((d, s) for d, row in enumerate(self.plan) for s, owner in enumerate(row) if owner == worker)

    @property
    def doubled(self) -> set[str]:
        """The workers that own more than one cell."""
        return {worker for row in self.plan for worker in row if len(self.cells(worker)) > 1}


def view_of(body: Mapping[str, Any]) -> JobView:
    """Return the view of a BambooJob from the API server. Defaults replace unreadable spec fields and status."""
    metadata, status = read_api_part(Metadata, body.get("metadata")), read_status(body.get("status"))
    return JobView(metadata=metadata, spec=read_spec(body), status=status)


def view_of_run(spec: JobSpec, live: Status | None, now: datetime, began: datetime | None = None) -> JobView:
    """Return the view of a job that runs in this process, not on a cluster. live: None while the job starts. began:
    when it was started.
    """
    metadata = Metadata(name=spec.name, namespace=spec.namespace, creation_timestamp=began)
    status = run_status(live, now) if live is not None else BambooJobStatus()
    return JobView(metadata=metadata, spec=spec, status=status, live=live)
