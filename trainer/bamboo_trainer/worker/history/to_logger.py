"""`bamboo history --to`: writes an existing history into a logger."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bamboo_core.complaints import complain, complaint_of
from bamboo_core.history.files import find
from bamboo_core.history.merge import merged, newest
from bamboo_core.history.records import Record, StepRecord, from_lines
from bamboo_core.names import EXIT_FAILED, EXIT_OK
from bamboo_trainer.loggers.from_manifest import READY
from bamboo_trainer.loggers.interface import LoggerFacts, MakeLogger
from bamboo_trainer.worker.history.followers import facts_of

logger = logging.getLogger(__name__)


def write(source: str, make: MakeLogger) -> int:
    """Write a whole history into a logger, the last record of each step; return the number of steps.

    The run is the one of the job's own logger. Raises the logger's errors, HistoryError, StorageError, ValueError.
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
    """Return the facts of the history whose file a run has written at its end, if it still exists; else use the file's
    name.
    """
    try:
        return _facts(find(str(path.parent)).url)
    except ValueError:
        return facts_of(path.stem, str(path.parent))


def _facts(url: str) -> LoggerFacts:
    """Return the facts. url: of a job's history, which ends with the job's name."""
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
