"""The end of a local run's history, which this process writes after all workers have left."""

from collections import deque
from pathlib import Path
from typing import Final

from msgspec import structs

from bamboo_core.control.protocol import Evaluated, HistoryEvents, StepCommitted
from bamboo_core.history.files import LAST_EPOCH, HistoryFile, HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import EvaluationRecord, EventRecord, HistoryError, Record, StepRecord, to_lines
from bamboo_core.storage.bounded import StorageError

FILE: Final = "history.jsonl"
MOST_STEPS: Final = 10_000  # as many as a worker keeps while the store is away


class StepsHeard:
    """Record of the newest MOST_STEPS steps and evaluations that workers reported, to fill gaps in a stored history.

    batch: samples per step.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._evaluations: deque[EvaluationRecord] = deque(maxlen=MOST_STEPS)
        self._attempt = 1  # counted from the beginning of the run

    def committed(self, commit: StepCommitted, time: float) -> None:
        """Record a committed step; a repeated step begins a new attempt. time: seconds since 1970."""
        step = commit.step + 1
        if self._steps and step <= self._steps[-1].step:
            self._attempt += 1
        record = StepRecord(
            attempt=self._attempt,
            step=step,
            time=time,
            loss=commit.loss,
            gradient_norm=commit.gradient_norm,
            learning_rate=commit.learning_rate,
            seconds=commit.seconds or None,
            samples=step * self._batch,
            skipped=commit.skipped,
            checkpoint=commit.checkpoint is not None,
            metrics=commit.metrics,
        )
        self._steps.append(record)

    def evaluated(self, report: Evaluated, time: float) -> None:
        """Record the evaluations that are new in this attempt. time: seconds since 1970."""
        known = {one.step for one in self._evaluations if one.attempt == self._attempt}
        for step in sorted(report.states.keys() - known):
            metrics = report.states[step]
            self._evaluations.append(EvaluationRecord(attempt=self._attempt, step=step, time=time, metrics=metrics))

    def numbered(self, newest: int) -> list[Record]:
        """Return the records of the current attempt, renumbered to the stored history's newest attempt.

        newest: the number of that attempt; 0 if the history has none: all records are returned unchanged.
        """
        records: list[Record] = [*self._steps, *self._evaluations]
        if not newest:
            return records
        return [structs.replace(one, attempt=newest) for one in records if one.attempt == self._attempt]


def end_history(url: str, rest: HistoryEvents, steps: StepsHeard, output: Path | None) -> None:
    """Add the events of `rest` to the history at `url`, and write the whole history to FILE in `output`, if given.

    If the store has no history or cannot be read, FILE has only the records of `steps` and `rest`; without steps,
    nothing is written. Raises StorageError for FILE; after writing FILE, StorageError or HistoryError for the store.
    """
    files, problem = HistoryFiles(url), None
    stored: list[HistoryFile] = []
    kept: list[Record] = []
    try:
        files.remove_partial(older=0.0)  # no worker writes any more
        stored = files.all()
        kept = files.read_all()
    except (StorageError, HistoryError) as error:
        problem = error
    more = steps.numbered(max((one.attempt for one in kept), default=0))
    if not (kept or more):
        if problem is not None:
            raise problem
        return  # no step was committed, and no file was begun
    attempt = max(record.attempt for record in [*kept, *more])
    records = [
        EventRecord(
            attempt=attempt,
            time=event.time,
            reason=event.reason,
            message=event.message,
            warning=event.warning,
            source=rest.source,
            number=event.number,
        )
        for event in rest.events
    ]
    if stored and records and problem is None:
        number = sum(file.epoch == LAST_EPOCH for file in stored)
        try:
            files.write(HistoryFile(stored[-1].attempt, LAST_EPOCH, number), records)
        except StorageError as error:
            problem = error
    if output is not None:
        HistoryFiles(output.absolute().as_uri()).write_bytes(FILE, to_lines(merged([*kept, *more, *records])))
    if problem is not None:
        raise problem
