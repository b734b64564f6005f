"""A logger to a run of MLflow, which all writers for the job find by its tag."""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from bamboo_core.history.records import EvaluationRecord, Record, StepRecord
from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger, scalars

TAG: Final = "bamboo.run"
AT_ONCE: Final = 1000  # numbers that a server takes in one request


def mlflow(experiment: str, tracking_uri: str = "") -> MakeLogger:
    """Return a logger to MLflow. tracking_uri: default MLFLOW_TRACKING_URI. Credentials: from the environment."""
    return partial(_MlFlow, experiment, tracking_uri)


class _MlFlow(Logger):
    def __init__(self, experiment: str, tracking_uri: str, facts: LoggerFacts) -> None:
        try:
            tracking: Any = importlib.import_module("mlflow.tracking")
            self._entities: Any = importlib.import_module("mlflow.entities")
        except ImportError:
            raise ValueError("mlflow is not installed: pip install 'bamboo-trainer[mlflow]'") from None
        self._client = tracking.MlflowClient(tracking_uri or None)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
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
