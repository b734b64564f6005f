"""Histories put together: each record once and in order, whoever wrote it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bamboo.history.files import find
from bamboo.history.merge import curve, merged, to_csv
from bamboo.history.records import EventRecord, StepRecord
from history_kit import event, shown, step

pytest_plugins = ["history_fixtures"]


def test_each_record_is_there_once_and_in_order(kept):
    records = merged(find(str(kept)).read_all())
    steps = [(r.attempt, r.step) for r in records if isinstance(r, StepRecord)]
    assert steps == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]
    assert [r.number for r in records if isinstance(r, EventRecord)] == [1, 2]
    assert records[1] == event(1, 1000.5)
    assert records[2].loss == 0.5, "what was written first stays"


def test_the_curve_has_each_step_as_it_was_done_last(kept):
    records = curve(find(str(kept)).read_all())
    assert [(r.attempt, r.step) for r in records] == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_curve_has_no_doubles_and_no_gaps_whatever_was_repeated(attempts):
    """Each attempt begins where one before it has been, and does so many steps."""
    records, reached = [], 0
    for number, (first, count) in enumerate(attempts, 1):
        begin = min(first, reached)
        reached = begin + count
        records += [step(s, number) for s in range(begin, reached)]
    assert [r.step for r in curve(records)] == list(range(reached))


def test_a_history_is_printed_as_lines_json_and_csv(kept, tmp_path):
    lines = shown(kept).splitlines()
    assert len(lines) == 8
    assert "Happened: no 1" in lines[1]
    assert lines[-1].endswith("step 5, loss not finite, gradient norm 0.5, a b 2.0, skipped, attempt 2")
    assert len(shown(kept, "--all").splitlines()) == 10
    assert [json.loads(line)["kind"] for line in shown(kept, "-o", "json").splitlines()].count("step") == 6
    table = shown(kept, "-o", "csv").splitlines()
    assert table[0].startswith("attempt,step,time,loss,")
    assert table[0].endswith(",skipped,a b")
    assert table[-1] == "2,5,2005.0,,0.5,,,,,,,True,2.0"
    whole = tmp_path / "history.jsonl"
    whole.write_text(shown(kept, "--all", "-o", "json"))
    assert shown(whole) == shown(kept)
    assert to_csv([]) == table[0].removesuffix(",a b") + "\n"
