"""A coordinator's status of its job in the form of a BambooJob's status. Pure; the time is passed in."""

import json
import math
from collections.abc import Mapping
from datetime import datetime, timedelta

from bamboo_core.coordinator.events import Status, WorkerState
from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.fields import MAX_INT64
from bamboo_core.job.status import (
    BambooJobStatus,
    CheckpointStatus,
    EvaluationStatus,
    PipelineCounts,
    TrainingProgress,
    WorkerCounts,
)


def run_status(live: Status, now: datetime) -> BambooJobStatus:
    """Return the status that the coordinator knows: no conditions, no cost, and counts since it was created."""
    ready = sum(1 for _, state in live.workers if state is not WorkerState.STARTING)
    kept = live.checkpoint
    return BambooJobStatus(
        state=live.phase,
        pipelines=PipelineCounts(desired=len(live.grid), ready=len(live.grid)),
        workers=WorkerCounts(desired=live.wanted, ready=ready),
        preemptions=live.preemptions,
        takeovers=len(live.takeovers),
        restores=kept.restores if kept else 0,
        restarts=live.restarts,
        training=training_progress(live, now),
        checkpoint=_checkpoint(live, now),
        digests=live.digests or None,
        plan=_plan(live),
    )


def _plan(live: Status) -> str | None:
    """Return the owners of stages as JSON, without what another coordinator would need."""
    owners = [[owner for owner, _ in row] for row in live.grid]
    return json.dumps({"epoch": live.epoch, "pipelines": owners}, separators=(",", ":")) if owners else None


def _checkpoint(live: Status, now: datetime) -> CheckpointStatus:
    known = live.checkpoint
    if known is None or known.step is None:
        return CheckpointStatus()
    time = None if known.age is None else whole_seconds(now - timedelta(seconds=known.age))
    return CheckpointStatus(last_step=known.step, last_time=time)


def training_progress(live: Status, now: datetime) -> TrainingProgress:
    """Return the progress at that time."""
    return TrainingProgress(
        step=live.step,
        steps=live.steps,
        samples_per_second=_rounded(live.samples_per_second, 3),
        loss=_rounded(live.loss, 6),
        eta_seconds=_whole(live.eta_seconds),
        evaluation=_evaluation(live) if live.evaluations else None,
        last_reported_time=whole_seconds(now),
    )


def _evaluation(live: Status) -> EvaluationStatus:
    """Return the newest evaluation."""
    step, metrics = live.evaluations[-1]
    return EvaluationStatus(step=step, metrics=_known(metrics))


def _known(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if value is not None}


def _rounded(number: float | None, digits: int) -> float | None:
    return round(number, digits) if number is not None and math.isfinite(number) else None


def _whole(seconds: float | None) -> int | None:
    return max(0, round(seconds)) if seconds is not None and abs(seconds) <= MAX_INT64 else None
