"""Merged histories: each record appears once and in order, whichever worker wrote it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.history.files import find
from bamboo_core.history.merge import curve, merged, newest
from bamboo_core.history.records import EvaluationRecord, EventRecord, StepRecord
from history_kit import evaluated, event, shown, step

pytest_plugins = ["history_kit"]


def test_each_record_is_there_once_and_in_order(kept):
    records = merged(find(str(kept)).read_all())
    steps = [(r.attempt, r.step) for r in records if isinstance(r, StepRecord)]
    assert steps == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 4), (2, 5), (2, 6)]
    assert [r.number for r in records if isinstance(r, EventRecord)] == [1, 2]
    assert records[1] == event(1, 1001.5)
    assert records[2].loss == 0.5, "what was written first stays"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_curve_has_no_doubles_and_no_gaps_whatever_was_repeated(attempts):
    """The curve has each step once, although attempts repeat steps. attempts: for each, steps before it and in it."""
    records, reached = [], 0
    for number, (first, count) in enumerate(attempts, 1):
        begin = min(first, reached)
        reached = begin + count
        records += [step(s, number) for s in range(begin + 1, reached + 1)]
    assert [r.step for r in curve(records)] == list(range(1, reached + 1))


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
