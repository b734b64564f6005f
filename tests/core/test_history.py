"""Histories: each record once and in order, whoever wrote it; what is printed of them; what a shell tells the root."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.control.history_feed import AT_ONCE, MOST_WAITING, HistoryFeed
from bamboo.control.protocol import HistoryKept
from bamboo.history.files import HistoryFile, HistoryFiles, file_of, find
from bamboo.history.merge import curve, merged, to_csv
from bamboo.history.records import EventRecord, GapRecord, HistoryError, StepRecord, from_lines, to_lines
from bamboo.local.history_end import end_history


def step(number, attempt=1, **more):
    usual = {"time": 1000.0 * attempt + number, "loss": 1.0 / (number + 1), "gradient_norm": 0.5}
    return StepRecord(attempt=attempt, step=number, **(usual | more))


def event(number, at, source="a", **more):
    return EventRecord(attempt=1, time=at, reason="Happened", message=f"no {number}", source=source, number=number)


def shown(*words, code=0):
    done = CliRunner().invoke(app, ["history", *map(str, words)])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def kept(tmp_path):
    """A job that went back from step 5 to step 3; its second root had read too little and wrote step 1 again."""
    files = HistoryFiles(str(tmp_path / "run" / "history" / "job"))
    files.write(HistoryFile(1, 1, 0), [event(1, 1000.5), *map(step, range(3))])
    files.write(HistoryFile(1, 7, 0), [step(1, loss=9.0), step(3), step(4), event(1, 1000.5), event(2, 1003.5)])
    files.write(HistoryFile(2, 9, 0), [step(3, 2), step(4, 2), step(5, 2, skipped=True, loss=None, metrics={"a b": 2})])
    return tmp_path / "run"


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


def test_lines_are_read_as_they_were_written_and_newer_fields_do_no_harm():
    records = [step(1, metrics={"x": None}), event(3, 5.0), GapRecord(attempt=1, time=1, first=2, last=3, message="m")]
    assert from_lines(to_lines(records), "f") == records
    assert from_lines(to_lines(records).replace(b'"kind"', b'"later":[1],"kind"'), "f") == records
    with pytest.raises(HistoryError, match=r"^f line 2 is no record of a history: "):
        from_lines(to_lines([step(1)]) + b'{"kind": "st', "f")


def test_names_sort_as_they_were_begun():
    files = [HistoryFile(2, 1, 0), HistoryFile(1, 12, 3), HistoryFile(1, 9, 10)]
    assert sorted(file.name for file in files) == [file.name for file in sorted(files)]
    assert [file_of(file.name) for file in files] == files
    assert file_of("000001-0000000001-000000.jsonl.partial") is None


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


def test_what_is_no_history_is_told(kept, tmp_path):
    assert f"there is no history in {tmp_path}" in shown(tmp_path, code=1)
    HistoryFiles(str(kept / "history" / "other")).write(HistoryFile(1, 1, 0), [step(0)])
    assert "there are the histories of several jobs" in shown(kept, code=1)
    assert len(shown(kept / "history" / "other").splitlines()) == 1
    (kept / "history" / "other" / "000001-0000000002-000000.jsonl").write_text("rubbish\n")
    assert "000001-0000000002-000000.jsonl line 1 is no record" in shown(kept / "history" / "other", code=1)
    assert "--follow and --output csv: expected at most one of them" in shown(kept, "-f", "-o", "csv", code=2)


def test_a_root_is_told_every_event_until_it_is_kept():
    feed = HistoryFeed("s", lambda: 7.0)
    assert feed.due("w0") is None
    for number in range(3):
        feed.add("Reason", f"message {number}", warning=number == 1)
    assert feed.due(None) is None
    told = feed.due("w0")
    assert [(e.number, e.warning) for e in told.events] == [(1, False), (2, True), (3, False)]
    assert feed.due("w0") is None
    feed.kept(HistoryKept(source="s", number=2))
    feed.kept(HistoryKept(source="another", number=3))
    assert [e.number for e in feed.due("w1").events] == [3], "a new root is told what is not known to be kept"
    feed.rejoined("w1")
    assert [e.number for e in feed.due("w1").events] == [3]
    feed.rejoined("w2")
    assert feed.due("w1") is None


def test_what_a_root_is_told_is_bounded():
    feed = HistoryFeed("s", lambda: 7.0)
    for number in range(MOST_WAITING + 5):
        feed.add("Reason", f"message {number}", warning=False)
    told = []
    while (events := feed.due("w0")) is not None:
        assert len(events.events) <= AT_ONCE
        told += [event.number for event in events.events]
    assert told == list(range(6, MOST_WAITING + 6))


def test_the_end_of_a_local_run_adds_what_no_worker_has_written(kept):
    feed = HistoryFeed("z", lambda: 9999.0)
    feed.add("Complete", "all is done", warning=False)
    url = str(kept / "history" / "job")
    for _ in range(2):  # twice does no harm
        end_history(url, feed.rest(), kept)
    records = from_lines((kept / "history.jsonl").read_bytes(), "history.jsonl")
    assert len(records) == 11
    assert (records[-1].reason, records[-1].attempt) == ("Complete", 2)
