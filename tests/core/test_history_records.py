"""A history's lines: encoding, newer fields, and refusal of another version."""

import pytest

from bamboo_core.history.records import HistoryError, from_lines, to_lines
from history_kit import evaluated, event, step


def test_lines_are_read_as_they_were_written_and_newer_fields_do_no_harm():
    records = [step(1, metrics={"x": None}), event(3, 5.0), evaluated(1, y=2.0)]
    assert from_lines(to_lines(records), "f") == records
    assert from_lines(to_lines(records).replace(b'"kind"', b'"later":[1],"kind"'), "f") == records
    with pytest.raises(HistoryError, match=r"^f line 3 is no record of a history: "):
        from_lines(to_lines([step(1)]) + b'{"kind": "st', "f")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"kind":"history","version":3}\n{"kind":"step"}\n', "is of version 3"),
        (to_lines([step(1)]).split(b"\n", 1)[1], "does not begin with its version"),
    ],
)
def test_a_file_of_another_version_is_refused(data, why):
    with pytest.raises(HistoryError, match=rf"^f {why}; this version of Bamboo reads 2$"):
        from_lines(data, "f")
