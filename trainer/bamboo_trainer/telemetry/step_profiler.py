"""torch.profiler in chosen steps of a local run's workers (`bamboo run --profile`), with instructions as spans.

Each step has its own file, `WORKER.STEP.pt.trace.json.gz`, written between two steps: TensorBoard's plugin reads the
folder, and Perfetto opens a file. A lost worker loses the step in progress.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from bamboo_core.complaints import said_by
from bamboo_core.planning.plan import Cell
from bamboo_trainer.telemetry.spans import NEVER_AWAITED, Follower, Span

logger = logging.getLogger(__name__)


class StepProfiler(Follower):
    """A follower of spans that profiles steps `first` to `last`, counted from 1.

    If the profiler cannot be started, ended or written, it logs that and does not try again.
    """

    def __init__(self, worker: str, first: int, last: int, folder: Path) -> None:
        self._worker, self._first, self._last, self._folder = worker, first, last, folder
        self._activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and ProfilerActivity.CUDA in supported_activities():  # type: ignore[no-untyped-call]
            self._activities.append(ProfilerActivity.CUDA)
        self._newest = 0  # the last step that was recorded
        self._recorded: profile | None = None
        self._step: record_function | None = None  # the whole step's, with the name that TensorBoard expects
        self._span: record_function | None = None  # of an instruction
        self._try(self._warm_up)

    @classmethod
    def of(cls, worker: str, wanted: str) -> Self:
        """Create a profiler from FIRST:LAST:FOLDER."""
        first, last, folder = wanted.split(":", 2)
        return cls(worker, int(first), int(last), Path(folder))

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        if name not in NEVER_AWAITED and step + 1 > self._newest:  # an instruction of an earlier step may be repeated
            self._end()
            if self._first <= step + 1 <= self._last:
                self._newest = step + 1
                self._try(self._begin)
        if self._recorded is not None:
            self._span = record_function(
                f"{name} for stage {cell.stage} of pipeline {cell.pipeline}, step {step + 1}, microbatch {microbatch}"
            )
            self._span.__enter__()  # type: ignore[no-untyped-call]

    def ended(self, span: Span) -> None:
        self._end_span()

    def close(self) -> None:
        self._end()

    def _warm_up(self) -> None:
        """Start a profiler once: the first start in a process takes seconds, in which others would wait."""
        with profile(activities=self._activities):
            pass

    def _begin(self) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RuntimeError("the task's code has a profiler that runs")
        recorded = profile(activities=self._activities, acc_events=False)
        recorded.start()
        self._recorded, self._step = recorded, record_function(f"ProfilerStep#{self._newest}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def _end_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _end(self) -> None:
        """End the recording in progress, if any, and write its file."""
        if self._recorded is not None:
            self._end_span()
            self._try(self._write)

    def _write(self) -> None:
        recorded, step = self._recorded, self._step
        assert recorded is not None
        assert step is not None
        self._recorded = self._step = None
        step.__exit__(None, None, None)
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._folder / f"{self._worker}.{self._newest}.pt.trace.json.gz"))

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # whatever torch and a device's driver raise
            self._last = 0
            logger.warning("torch.profiler gives up: %s: %s", type(error).__name__, said_by(error))
