"""The end of a local run's history: this process is still there when all workers have gone."""

from pathlib import Path
from typing import Final

from bamboo.control.protocol import HistoryEvents
from bamboo.history.files import LAST_EPOCH, HistoryFile, HistoryFiles
from bamboo.history.merge import merged
from bamboo.history.records import EventRecord, to_lines

FILE: Final = "history.jsonl"


def end_history(url: str, rest: HistoryEvents, output: Path | None) -> None:
    """Writes the events that no worker has written, and all of the history to a file in the output folder, if any.

    Raises StorageError, HistoryError.
    """
    files = HistoryFiles(url)
    there = files.all()
    if not there:
        return  # no step was committed, and nobody has begun one
    attempt = there[-1].attempt
    records = [
        EventRecord(
            attempt=attempt, time=event.time, reason=event.reason, message=event.message, warning=event.warning,
            source=rest.source, number=event.number,
        )
        for event in rest.events
    ]  # fmt: skip
    if records:
        number = sum(file.epoch == LAST_EPOCH for file in there)
        files.write(HistoryFile(attempt, LAST_EPOCH, number), records)
    if output is not None:
        HistoryFiles(output.absolute().as_uri()).write_bytes(FILE, to_lines(merged(files.read_all())))
