"""The loggers of a job: the task's own, and those that the manifest names."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from bamboo_core.job.training_spec import LoggerSpec, LoggerType, TrainingSpec
from bamboo_trainer.loggers import MakeLogger, mlflow, tensorboard, wandb
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
    """Return the functions that create the loggers of the task and of the manifest (`training.loggers`), by name.
    Raises TaskError, naming the field.
    """
    loggers = dict(task.loggers)
    for number, spec in enumerate(training.loggers):
        where = f"training.loggers[{number}]"
        if spec.name in loggers:
            raise TaskError(f"{where}.name: the task has a logger {spec.name!r}, too")
        _refuse_secrets(spec.config, f"{where}.config")
        loggers[spec.name] = _called(READY[spec.type], spec, where)
    return loggers


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
