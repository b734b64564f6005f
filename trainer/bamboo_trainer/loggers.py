"""Writers of a job's history to other systems: TensorBoard, MLflow, Weights & Biases. docs/history.md is the
introduction.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerFacts:
    """The facts about the job that a logger gets."""

    job: str  # its name
    run: str  # the run's ID, the same for all workers that write for the job, one after the other
    folder: str = ""  # of the job's history on this machine; "" if it is in an object store


class Logger(Protocol):
    """A writer of the history to another system, called by a separate thread.

    If `write` raises an error, a new logger gets its records again; of errors in a row only the first is reported.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Write records of the history, in order. An earlier logger may already have written some of them."""

    def close(self) -> None:
        """Close the logger: it gets no more records."""


MakeLogger = Callable[[LoggerFacts], Logger]


def scalars(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return a record's numbers for charts by name, without None. An evaluation's names begin with "evaluation/"."""
    if isinstance(record, EvaluationRecord):
        return _known({f"evaluation/{name}": value for name, value in record.metrics.items()})
    numbers = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "learning_rate": record.learning_rate,
        "seconds": record.seconds,
        "samples": record.samples,
        "samples_per_second": record.samples_per_second,
        "tokens": record.tokens,
        "tokens_per_second": record.tokens_per_second,
    }
    return _known(numbers | record.metrics)


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _library(module: str, extra: str) -> Any:
    """Import and return a module. Raises ValueError for an ImportError. extra: bamboo-trainer's extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"{extra} is not installed: pip install 'bamboo-trainer[{extra}]'") from None


TAG: Final = "bamboo.run"
AT_ONCE: Final = 1000  # metrics that a server accepts in one request


def mlflow(experiment: str, tracking_uri: str = "") -> MakeLogger:
    """Return a function that creates a logger to MLflow. Credentials come from the environment.

    tracking_uri: by default MLFLOW_TRACKING_URI or, without that, MLflow's own default.
    """
    return partial(_MlFlow, experiment, tracking_uri)


class _MlFlow(Logger):
    def __init__(self, experiment: str, tracking_uri: str, facts: LoggerFacts) -> None:
        tracking, self._entities = _library("mlflow.tracking", "mlflow"), _library("mlflow.entities", "mlflow")
        self._client = tracking.MlflowClient(tracking_uri or None)
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], f"tags.`{TAG}` = '{facts.run}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(number, run_name=facts.job, tags={TAG: facts.run})
        self._run = run.info.run_id

    def write(self, records: Sequence[Record]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(record.time * 1000), record.step)
            for record in records
            if isinstance(record, StepRecord | EvaluationRecord)
            for name, value in scalars(record).items()
        ]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics[start : start + AT_ONCE])

    def close(self) -> None:
        """Leave the run open: another worker may continue it."""


def tensorboard(folder: str = "") -> MakeLogger:
    """Return a function that creates a logger to TensorBoard. folder: for the event files; by default `tensorboard` in
    the folder of the job's history, which must then be on this machine.
    """
    return partial(_TensorBoard, folder)


class _TensorBoard(Logger):
    """A writer of event files. It begins a new file at its first step or evaluation, and when the step number falls;
    TensorBoard then ignores the steps in earlier files that the new file replaces.
    """

    def __init__(self, folder: str, facts: LoggerFacts) -> None:
        module = _library("torch.utils.tensorboard", "tensorboard")
        if not folder and not facts.folder:
            raise ValueError("tensorboard: the job's history is in an object store; expected a folder")
        self._folder = folder or f"{facts.folder}/tensorboard"
        self._open: Any = module.SummaryWriter
        self._writer: Any = None
        self._step = 0

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, StepRecord):
                self._begin_anew(record.step, record.step)
                self._write_scalars(record)
            elif isinstance(record, EvaluationRecord):
                self._begin_anew(record.step, record.step + 1)  # the step itself stays
                self._write_scalars(record)
            elif isinstance(record, EventRecord) and self._writer is not None:
                self._writer.add_text("events", f"{record.reason}: {record.message}", self._step, record.time)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _begin_anew(self, step: int, forgotten: int) -> None:
        """Begin an event file if there is none, or if the step number falls. forgotten: the first step to replace."""
        if self._writer is None or step < self._step:
            self.close()
            self._writer = self._open(self._folder, purge_step=forgotten)
        self._step = step

    def _write_scalars(self, record: StepRecord | EvaluationRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step, record.time)


def wandb(project: str, **settings: Any) -> MakeLogger:
    """Return a function that creates a logger to Weights & Biases; WANDB_API_KEY may hold the key. settings: other
    arguments of `wandb.init`; dir: by default WANDB_DIR, else the folder of the job's history if it is on this machine.
    """
    return partial(_WeightsAndBiases, {"project": project, **settings})


class _WeightsAndBiases(Logger):
    """A writer to a run of Weights & Biases. The run ignores steps before its newest: no step appears twice."""

    def __init__(self, settings: dict[str, Any], facts: LoggerFacts) -> None:
        module = _library("wandb", "wandb")
        place = {"dir": facts.folder} if facts.folder and not os.environ.get("WANDB_DIR") else {}
        self._run: Any = module.init(**{"name": facts.job, "id": facts.run, "resume": "allow", **place, **settings})

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, StepRecord | EvaluationRecord):
                self._run.log({**scalars(record), "attempt": record.attempt}, step=record.step)
            elif isinstance(record, EventRecord) and record.warning:
                self._run.summary["last_warning"] = f"{record.reason}: {record.message}"

    def close(self) -> None:
        self._run.finish()


__all__ = ["Logger", "LoggerFacts", "MakeLogger", "mlflow", "tensorboard", "wandb"]
