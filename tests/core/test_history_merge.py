"""Histories put together: each record once and in order, whoever wrote it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.history.files import find
from bamboo_core.history.merge import curve, merged, newest
from bamboo_core.history.records import EvaluationRecord, EventRecord, GapRecord, StepRecord
from history_kit import evaluated, event, shown, step

pytest_plugins = ["history_fixtures"]


def test_each_record_is_there_once_and_in_order(kept):
    records = merged(find(str(kept)).read_all())
    steps = [(r.attempt, r.step) for r in records if isinstance(r, StepRecord)]
    assert steps == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 4), (2, 5), (2, 6)]
    assert [r.number for r in records if isinstance(r, EventRecord)] == [1, 2]
    assert records[1] == event(1, 1001.5)
    assert records[2].loss == 0.5, "what was written first stays"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_curve_has_no_doubles_and_no_gaps_whatever_was_repeated(attempts):
    """Each attempt begins where one before it has been, and does so many steps."""
    records, reached = [], 0
    for number, (first, count) in enumerate(attempts, 1):
        begin = min(first, reached)
        reached = begin + count
        records += [step(s, number) for s in range(begin + 1, reached + 1)]
    assert [r.step for r in curve(records)] == list(range(1, reached + 1))


def gaps(records):
    return [(record.attempt, record.first, record.last) for record in records if isinstance(record, GapRecord)]


def test_what_is_missing_is_told_whether_or_not_its_writer_has_told_it():
    told = GapRecord(attempt=1, time=1003.0, first=3, last=6, message="m")
    records = merged([*map(step, (1, 2, 7, 10)), told, step(13, 2)])
    assert gaps(records) == [(1, 3, 6), (1, 8, 9), (2, 11, 12)]
    assert merged(records) == records, "what is told need not be told again"
    filled = merged([*records, *map(step, (4, 8, 9))])  # by a writer that was only thought to be lost
    assert gaps(filled) == [(1, 3, 3), (1, 5, 6), (2, 11, 12)]
    again = merged([*filled, *(step(s, 2) for s in range(5, 13))])
    assert gaps(newest(again)) == [(1, 3, 3)], "what was done later is not missing"
    assert gaps(merged([step(4)])) == [(1, 1, 3)]


@given(st.lists(st.sets(st.integers(1, 13), min_size=1), min_size=1, max_size=4))
def test_each_step_is_there_once_or_in_one_gap(attempts):
    records = merged([step(s, number) for number, steps in enumerate(attempts, 1) for s in steps])
    seen = newest(records)
    there = [record.step for record in seen if isinstance(record, StepRecord)]
    missing = [s for _, first, last in gaps(seen) for s in range(first, last + 1)]
    assert sorted(set(there) | set(missing)) == list(range(1, max(there) + 1))
    assert len(there) == len(set(there))
    assert not set(there) & set(missing)


def test_a_history_is_printed_as_lines_and_json(kept, tmp_path):
    lines = shown(kept).splitlines()
    assert len(lines) == 8
    assert "Happened: no 1" in lines[1]
    assert lines[-1].endswith("step 6, loss not finite, gradient norm 0.5, a b 2.0, skipped, attempt 2")
    assert len(shown(kept, "--all").splitlines()) == 10
    assert [json.loads(line)["kind"] for line in shown(kept, "-o", "json").splitlines()].count("step") == 6
    whole = tmp_path / "history.jsonl"
    whole.write_text(shown(kept, "--all", "-o", "json"))
    assert shown(whole) == shown(kept)


def test_an_evaluation_is_of_the_state_after_its_step_and_shown_as_it_was_done_last():
    first = [*map(step, (1, 2)), evaluated(2, x=0.5), *map(step, (3, 4)), evaluated(4, x=0.4)]
    again = [evaluated(2, 2, x=0.5), step(3, 2), step(4, 2), evaluated(4, 2, x=0.25)]
    records = merged([*reversed(first), *reversed(again)])
    assert records == [*first, *again], "each behind its step"
    assert newest(records) == [*map(step, (1, 2)), *again]
    assert [record.step for record in curve(records)] == [1, 2, 3, 4]
    gone_back_before = [*first, *(step(s, 2) for s in (2, 3, 4, 5))]
    assert [r for r in newest(merged(gone_back_before)) if isinstance(r, EvaluationRecord)] == []
