"""A history's lines, as they are written and read."""

import pytest

from bamboo.history.records import GapRecord, HistoryError, from_lines, to_lines
from history_kit import event, step


def test_lines_are_read_as_they_were_written_and_newer_fields_do_no_harm():
    records = [step(1, metrics={"x": None}), event(3, 5.0), GapRecord(attempt=1, time=1, first=2, last=3, message="m")]
    assert from_lines(to_lines(records), "f") == records
    assert from_lines(to_lines(records).replace(b'"kind"', b'"later":[1],"kind"'), "f") == records
    with pytest.raises(HistoryError, match=r"^f line 2 is no record of a history: "):
        from_lines(to_lines([step(1)]) + b'{"kind": "st', "f")
