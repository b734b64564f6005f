"""Values of the Python API: events, progress and history of a job, here or on a cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from bamboo.terminal.phrases import progress_words
from bamboo_core.coordinator.events import Status
from bamboo_core.history.merge import merged, newest
from bamboo_core.history.records import Record, StepRecord
from bamboo_core.job.spec import JobSpec
from bamboo_core.view.job_view import JobView, view_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """An event of a job: a CamelCase reason and a sentence. time: seconds since 1970."""

    time: float
    reason: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{'! ' if self.warning else ''}{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """A job's progress.

    state: Starting, Running, Degraded, Restoring, Suspended, Complete, Failed and others, as in `bamboo status`. steps:
    None if only the task's data determine it. grid: workers by pipeline and stage. workers: number of ready workers.
    loss, eta_seconds, samples_per_second: None if unknown. checkpoint_step: of the newest checkpoint, None without one.
    page: URL of the job's page, "" if there is none. metrics, lost_samples: only of local jobs.
    """

    name: str
    state: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    metrics: tuple[tuple[str, float | None], ...] = ()
    samples_per_second: float | None = None
    eta_seconds: float | None = None
    grid: tuple[tuple[str, ...], ...] = ()
    workers: int = 0
    preemptions: int = 0
    takeovers: int = 0
    lost_samples: int | None = None
    checkpoint_step: int | None = None
    message: str = ""
    page: str = ""

    def facts(self) -> list[str]:
        """Return step, loss, speed and time left, in a few words each."""
        return progress_words(
            self.step,
            self.steps,
            loss=self.loss,
            samples_per_second=self.samples_per_second,
            eta_seconds=self.eta_seconds,
        )

    def __str__(self) -> str:
        """Return the progress as one line."""
        parts = [f"{self.name}: {self.state}", *self.facts()]
        if self.preemptions:
            parts.append(f"preemptions {self.preemptions}, takeovers {self.takeovers}")
        return ", ".join(parts) + (f". {self.message}" if self.message else "")


def progress_of(view: JobView) -> JobProgress:
    """Return a job's progress. view: the job as read from the cluster, or as built for a local run."""
    status, condition = view.status, view.status.ended or view.status.condition("Suspended")
    training = status.training
    return JobProgress(
        name=view.name,
        state=view.state.name,
        step=view.step,
        steps=view.steps or None,
        loss=training.loss,
        samples_per_second=training.samples_per_second,
        eta_seconds=training.eta_seconds,
        grid=tuple(tuple(view.short(owner) for owner in pipeline) for pipeline in view.plan),
        workers=status.workers.ready,
        preemptions=status.preemptions,
        takeovers=status.takeovers,
        checkpoint_step=status.checkpoint.last_step,
        message=condition.message if condition is not None and condition.holds else "",
    )


def local_progress(spec: JobSpec, live: Status, page: str) -> JobProgress:
    """Return the progress of a run on this machine. page: URL of its page, "" without a page."""
    view = view_of_run(spec, live, datetime.now(UTC))
    return replace(progress_of(view), metrics=live.metrics, lost_samples=live.lost_samples, page=page)


class HistoryRows(Sequence[dict[str, Any]]):
    """The rows of a job's history, oldest first: committed steps, evaluations and events. `kind` names which.

    docs/history.md describes their fields. A step that was repeated appears once, with its last result.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = newest(merged(records))
        self._rows: list[dict[str, Any]] = [msgspec.to_builtins(record) for record in self._records]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def losses(self) -> list[tuple[int, float | None]]:
        """Return (step, loss) for each committed step; the loss is None if it was not finite."""
        return [(one.step, one.loss) for one in self._records if isinstance(one, StepRecord)]

    def to_pandas(self) -> Any:
        """Return the rows as a pandas.DataFrame; nested fields become columns. Raises ImportError without pandas."""
        import pandas  # type: ignore[import-untyped]

        return pandas.json_normalize(self._rows)
