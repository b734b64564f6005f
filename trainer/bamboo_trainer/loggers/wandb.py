"""A logger to a run of Weights & Biases, which all writers for the job resume."""

import importlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger, scalars


def wandb(project: str, **settings: Any) -> MakeLogger:
    """Return a logger to Weights & Biases. settings: further arguments of `wandb.init`; dir: by default the folder of
    the job's history. The key comes from the environment, WANDB_API_KEY.
    """
    return partial(_WeightsAndBiases, {"project": project, **settings})


class _WeightsAndBiases(Logger):
    """A writer to a run, which ignores a step that it has already, so that none appears twice."""

    def __init__(self, settings: dict[str, Any], facts: LoggerFacts) -> None:
        try:
            module: Any = importlib.import_module("wandb")
        except ImportError:
            raise ValueError("wandb is not installed: pip install 'bamboo-trainer[wandb]'") from None
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
