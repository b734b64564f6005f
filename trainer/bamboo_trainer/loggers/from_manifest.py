"""The loggers that a manifest names, `spec.training.loggers`, in addition to the task's."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from bamboo_core.job.training_spec import LoggerSpec, LoggerType, TrainingSpec
from bamboo_trainer.loggers.interface import MakeLogger
from bamboo_trainer.loggers.mlflow import mlflow
from bamboo_trainer.loggers.tensorboard import tensorboard
from bamboo_trainer.loggers.wandb import wandb
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError

READY: Final[Mapping[LoggerType, Callable[..., MakeLogger]]] = {
    LoggerType.TENSORBOARD: tensorboard,
    LoggerType.WEIGHTS_AND_BIASES: wandb,
    LoggerType.MLFLOW: mlflow,
}
_SECRET: Final = re.compile(r"(^|_)(api_?key|password|passwd|secret|token|credentials?)$", re.IGNORECASE)
_USER_IN_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]+@", re.IGNORECASE)


def loggers_of(task: Task, training: TrainingSpec) -> dict[str, MakeLogger]:
    """Return the loggers of the task and of the manifest, by name, not connected yet. Raises TaskError, naming the
    field.
    """
    found = dict(task.loggers)
    for number, spec in enumerate(training.loggers):
        where = f"training.loggers[{number}]"
        if spec.name in found:
            raise TaskError(f"{where}.name: the task has a logger {spec.name!r}, too")
        _refuse_secrets(spec.config, f"{where}.config")
        found[spec.name] = _called(READY[spec.type], spec, where)
    return found


def _called(make: Callable[..., MakeLogger], spec: LoggerSpec, where: str) -> MakeLogger:
    try:
        return make(**spec.config)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where}.config: {error}") from error


def _refuse_secrets(config: Mapping[str, Any], where: str) -> None:
    """Raise TaskError for credentials, without repeating the value: many people read a manifest."""
    for key, value in config.items():
        if _SECRET.search(key) or (isinstance(value, str) and _USER_IN_URL.match(value)):
            raise TaskError(
                f"{where}.{key}: expected no credentials in a manifest; they come from the worker's environment, "
                "such as a Secret that worker.template names"
            )
        if isinstance(value, Mapping):
            _refuse_secrets(value, f"{where}.{key}")
