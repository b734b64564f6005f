"""Loggers that a manifest names, and `bamboo history --to`, which writes an existing history into a logger."""

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bamboo_core.complaints import complain, complaint_of
from bamboo_core.history.files import find
from bamboo_core.history.merge import merged, newest
from bamboo_core.history.records import Record, StepRecord, from_lines
from bamboo_core.job.training_spec import LoggerSpec, LoggerType, TrainingSpec
from bamboo_core.names import EXIT_FAILED, EXIT_OK
from bamboo_trainer.loggers import LoggerFacts, MakeLogger, mlflow, tensorboard, wandb
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.worker.followers import facts_of

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


logger = logging.getLogger(__name__)


def write(source: str, make: MakeLogger) -> int:
    """Write a whole history into a logger, the last record of each step; return the number of steps.

    source: the history's URL, or a .jsonl file. The run is the one that the job's own logger writes to. Raises the
    logger's errors, HistoryError, StorageError, ValueError.
    """
    records, facts = _read(source)
    target = make(facts)
    try:
        target.write(records)
    finally:
        target.close()
    return sum(isinstance(record, StepRecord) for record in records)


def _read(source: str) -> tuple[list[Record], LoggerFacts]:
    if "://" not in source and source.endswith(".jsonl"):
        path = Path(source).absolute()
        return newest(merged(from_lines(path.read_bytes(), source))), _facts_beside(path)
    files = find(source)
    return newest(merged(files.read_all())), _facts(files.url)


def _facts_beside(path: Path) -> LoggerFacts:
    """Return the facts of the history that a file's folder belongs to; if there is none, facts by the file's name."""
    try:
        return _facts(find(str(path.parent)).url)
    except ValueError:
        return facts_of(path.stem, str(path.parent))


def _facts(url: str) -> LoggerFacts:
    """Return a logger's facts. url: of a job's history, which ends with the job's name."""
    place = url if "://" in url else Path(url).absolute().as_uri()
    return facts_of(place.rstrip("/").rsplit("/", 1)[-1], place)


def main(arguments: Mapping[str, Any]) -> int:
    """Write a history into a logger. type, config: of the logger, as in a manifest. source: a history."""
    make: Callable[..., MakeLogger] = READY[arguments["type"]]
    try:
        steps = write(arguments["source"], make(**arguments["config"]))
    except Exception as error:  # whatever a logger raises
        logger.debug("the history was not written", exc_info=True)
        complain(complaint_of(error, f"while the history was written to {arguments['type']}"))
        return EXIT_FAILED
    print(f"{steps} steps written to {arguments['type']}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
