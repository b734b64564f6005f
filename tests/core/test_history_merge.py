"""Histories put together: each record once and in order, whoever wrote it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bamboo.history.files import find
from bamboo.history.merge import curve, merged, newest, to_csv
from bamboo.history.records import EventRecord, GapRecord, StepRecord
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


def gaps(records):
    return [(record.attempt, record.first, record.last) for record in records if isinstance(record, GapRecord)]


def test_what_is_missing_is_told_whether_or_not_its_writer_has_told_it():
    told = GapRecord(attempt=1, time=1002.0, first=2, last=5, message="m")
    records = merged([*map(step, (0, 1, 6, 9)), told, step(12, 2)])
    assert gaps(records) == [(1, 2, 5), (1, 7, 8), (2, 10, 11)]
    assert merged(records) == records, "what is told need not be told again"
    filled = merged([*records, *map(step, (3, 7, 8))])  # by a writer that was only thought to be lost
    assert gaps(filled) == [(1, 2, 2), (1, 4, 5), (2, 10, 11)]
    again = merged([*filled, *(step(s, 2) for s in range(4, 12))])
    assert gaps(newest(again)) == [(1, 2, 2)], "what was done later is not missing"
    assert gaps(merged([step(3)])) == [(1, 0, 2)]


@given(st.lists(st.sets(st.integers(0, 12), min_size=1), min_size=1, max_size=4))
def test_each_step_is_there_once_or_in_one_gap(attempts):
    records = merged([step(s, number) for number, steps in enumerate(attempts, 1) for s in steps])
    seen = newest(records)
    there = [record.step for record in seen if isinstance(record, StepRecord)]
    missing = [s for _, first, last in gaps(seen) for s in range(first, last + 1)]
    assert sorted(set(there) | set(missing)) == list(range(max(there) + 1))
    assert len(there) == len(set(there))
    assert not set(there) & set(missing)


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
