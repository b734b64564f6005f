"""A history's lines, as they are written and read."""

import pytest

from bamboo_core.history.records import EvaluationRecord, GapRecord, HistoryError, from_lines, to_lines
from history_kit import FROM_ZERO, evaluated, event, step


def test_lines_are_read_as_they_were_written_and_newer_fields_do_no_harm():
    gap = GapRecord(attempt=1, time=1, first=2, last=3, message="m")
    records = [step(1, metrics={"x": None}), event(3, 5.0), evaluated(1, y=2.0), gap]
    assert from_lines(to_lines(records), "f") == records
    assert from_lines(to_lines(records).replace(b'"kind"', b'"later":[1],"kind"'), "f") == records
    with pytest.raises(HistoryError, match=r"^f line 3 is no record of a history: "):
        from_lines(to_lines([step(1)]) + b'{"kind": "st', "f")


def test_a_file_that_counted_steps_from_0_is_read_as_one_that_counts_them_from_1():
    """It had an evaluation in the step after its state, and ended with a step that had nothing else."""
    read = from_lines(FROM_ZERO, "f")
    assert read == [step(1, samples=4), step(2, samples=8), evaluated(2, x=0.5)]
    assert from_lines(to_lines(read), "f") == read, "it is written as the newest version"
    both = FROM_ZERO.replace(b'"loss":0.5', b'"evaluation":{"x":2.0},"loss":0.5')
    assert from_lines(both, "f")[1:3] == [
        EvaluationRecord(attempt=1, step=1, time=1002.0, metrics={"x": 2.0}),
        step(2, samples=8),
    ]
    gap = b'{"kind":"gap","attempt":1,"time":1.0,"first":0,"last":2,"message":"m"}\n'
    assert from_lines(gap, "f") == [GapRecord(attempt=1, time=1.0, first=1, last=3, message="m")]
    assert from_lines(FROM_ZERO + to_lines([step(3)]), "f")[-1] == step(3), "files may be joined"


def test_a_file_of_a_later_version_is_refused():
    with pytest.raises(HistoryError, match=r"^f is of version 3; this version of Bamboo knows 1 to 2$"):
        from_lines(b'{"kind":"history","version":3}\n{"kind":"step"}\n', "f")
