"""The end of a local run's history."""

from pathlib import Path

import pytest

from bamboo.local.history_end import StepsHeard, end_history
from bamboo_core.control.protocol import StepCommitted
from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.history_feed import HistoryFeed
from bamboo_core.history.records import EventRecord, Record, StepRecord, from_lines
from bamboo_core.storage.bounded import StorageError

pytest_plugins = ["history_kit"]


def test_the_end_of_a_local_run_adds_what_no_worker_has_written(kept):
    feed = HistoryFeed("z", lambda: 9999.0)
    feed.add(Emit("Complete", "all is done"))
    url = str(kept / "history" / "job")
    for _ in range(2):  # twice does no harm
        end_history(url, feed.rest(), StepsHeard(4), kept)
    records = from_lines((kept / "history.jsonl").read_bytes(), "history.jsonl")
    assert len(records) == 11
    assert (records[-1].reason, records[-1].attempt) == ("Complete", 2)


def heard(*numbers: int) -> StepsHeard:
    steps = StepsHeard(4)
    for time, number in enumerate(numbers):
        said = StepCommitted(step=number, generation=0, loss=0.5, gradient_norm=1.0, microbatches=2, seconds=0.1)
        steps.committed(said, 9000.0 + time)
    return steps


def shown(records: list[Record]) -> list[tuple[int, int]]:
    return [(one.attempt, one.step) for one in records if isinstance(one, StepRecord)]


def test_steps_that_the_store_lacks_are_added_as_those_of_its_newest_attempt(kept: Path) -> None:
    """The store ends with step 6 of attempt 2; commits count steps from 0."""
    feed = HistoryFeed("z", lambda: 9999.0)
    end_history(str(kept / "history" / "job"), feed.rest(), heard(0, 1, 2, 3, 4, 3, 4, 5, 6), kept)
    records = from_lines((kept / "history.jsonl").read_bytes(), "history.jsonl")
    assert shown(records) == [*((1, n) for n in range(1, 6)), *((2, n) for n in range(4, 8))]


def test_the_output_has_a_history_whatever_becomes_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    feed = HistoryFeed("z", lambda: 9999.0)
    feed.add(Emit("Complete", "all is done"))
    with pytest.raises(StorageError, match="Not a directory"):
        end_history(str(tmp_path / "file" / "history"), feed.rest(), heard(0, 1, 2, 2), tmp_path)
    records = from_lines((tmp_path / "history.jsonl").read_bytes(), "history.jsonl")
    assert shown(records) == [(1, 1), (1, 2), (1, 3), (2, 3)]
    assert [one.reason for one in records if isinstance(one, EventRecord)] == ["Complete"]
