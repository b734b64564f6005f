"""A logger to event files of TensorBoard."""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger, scalars


def tensorboard(folder: str = "") -> MakeLogger:
    """Return a logger to TensorBoard. folder: for the event files; by default `tensorboard` in the folder of the job's
    history.
    """
    return partial(_TensorBoard, folder)


class _TensorBoard(Logger):
    """A writer of event files. It begins a new file each time that steps are repeated; TensorBoard then forgets later
    steps of earlier files.
    """

    def __init__(self, folder: str, facts: LoggerFacts) -> None:
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise ValueError("tensorboard is not installed: pip install 'bamboo-trainer[tensorboard]'") from None
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
        """Begin new files if that step is before the last written one. forgotten: the first step that they replace."""
        if self._writer is None or step < self._step:
            self.close()
            self._writer = self._open(self._folder, purge_step=forgotten)
        self._step = step

    def _write_scalars(self, record: StepRecord | EvaluationRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step, record.time)
