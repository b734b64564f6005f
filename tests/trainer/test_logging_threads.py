"""Loggers wait in threads of their own, and nobody waits for them."""

from pathlib import Path

from bamboo_core.control.protocol import WorkerWarning
from bamboo_core.history.records import EventRecord, StepRecord
from bamboo_trainer.worker.history import logging_threads
from logger_kit import PATIENCE, Kept, evaluated, step, until

pytest_plugins = ["logger_fixtures"]


def test_a_logger_gets_everything_once_and_the_next_root_goes_on(store):
    kept = Kept()
    store.add(None, step(0), step(1))
    first = store.threads(kept.make)
    store.add(first, step(2), EventRecord(attempt=1, time=101.0, reason="R", message="m", source="s", number=1))
    until(lambda: len(kept.given) == 4)
    first.close(PATIENCE)
    store.add(None, step(3))  # written, and given to nobody
    second = store.threads(kept.make)
    store.add(second, step(4))
    until(lambda: len(kept.given) >= 6)
    second.close(PATIENCE)
    assert [record.step for record in kept.given if isinstance(record, StepRecord)] == [0, 1, 2, 3, 4]
    assert kept.facts.job == "job"
    assert store.told == []


def test_a_logger_that_fails_is_told_once_and_gets_what_it_missed(store, monkeypatch):
    monkeypatch.setattr(logging_threads, "AGAIN_SECONDS", 0.01)
    bad, good = Kept(), Kept()
    bad.mood = "fails"
    store.add(None, step(0))
    threads = store.threads(bad.make, good.make)
    until(lambda: store.told)
    store.add(threads, step(1))
    until(lambda: len(good.given) == 2)
    bad.mood = ""
    until(lambda: len(bad.given) == 2)
    threads.close(PATIENCE)
    assert store.told == [WorkerWarning(reason="LoggerFailed", message="the logger l0: ConnectionError: no such host")]


def test_a_logger_that_hangs_holds_nobody_up(store, monkeypatch):
    monkeypatch.setattr(logging_threads, "SLOW_SECONDS", 0.05)
    stuck = Kept()
    stuck.mood = "hangs"
    store.add(None, step(0))
    threads = store.threads(stuck.make)
    until(lambda: store.told)
    for number in range(1, 50):
        threads.give([step(number)])
    threads.close(0.05)
    assert [message.reason for message in store.told] == ["LoggerFailed", "LoggerIncomplete"]
    assert "the logger l0 has not taken 49 steps" in store.told[1].message
    stuck.go_on.set()


def test_the_end_tells_for_what_it_waits_and_what_is_missing_although_the_logger_has_taken_all(store):
    """Some loggers write in a process of their own, which ends only when they are closed."""
    kept = Kept()
    kept.mood = "closes badly"
    store.add(None, step(0))
    idle = store.threads(Kept().make, begun=False)
    idle.announce_end(7.0)
    idle.close(PATIENCE)
    assert store.told == [], "this worker has not written the history"
    threads = store.threads(kept.make)
    until(lambda: kept.given)
    threads.announce_end(7.0)
    threads.close(PATIENCE)
    awaited, failed, incomplete = store.told
    assert (awaited.reason, awaited.message) == (
        "LoggersAwaited",
        "waiting up to 7 s for the logger l0 to take all of the history",
    )
    assert failed.reason == "LoggerFailed"
    assert incomplete.reason == "LoggerIncomplete"
    assert "the logger l0 has not finished" in incomplete.message


def test_who_is_the_root_no_longer_leaves_the_logger_to_the_next_one_and_may_come_back(store):
    """Two loggers that write into one run at the same time would take each other's place in it."""
    first, second = Kept(), Kept()
    store.add(None, step(0))
    mine, other = store.threads(first.make), store.threads(second.make, begun=False)
    until(lambda: first.given)
    mine.retire()
    until(lambda: first.closed)
    store.add(None, step(1))
    other.begin()
    until(lambda: second.given)
    other.retire()
    until(lambda: second.closed)
    store.add(None, step(2))
    mine.begin()
    mine.announce_end(7.0)
    mine.close(PATIENCE)
    other.announce_end(7.0)
    other.close(PATIENCE)
    assert [record.step for record in first.given] == [0, 2]
    assert [record.step for record in second.given] == [1]
    assert [message.reason for message in store.told] == ["LoggersAwaited"], "only the root is waited for"


def test_one_that_begins_anew_waits_for_the_one_before_it_and_says_so(store, monkeypatch):
    monkeypatch.setattr(logging_threads, "SLOW_SECONDS", 0.05)
    kept = Kept()
    kept.mood = "hangs"
    store.add(None, step(0))
    threads = store.threads(kept.make)
    until(lambda: store.told)
    threads.retire()
    threads.begin()
    until(lambda: len(store.told) == 2)
    assert "the one before it has not ended" in store.told[1].message
    kept.mood = ""
    kept.go_on.set()
    until(lambda: kept.closed)
    store.add(threads, step(1))
    threads.close(PATIENCE)
    assert [record.step for record in kept.given] == [0, 1]


def test_a_logger_goes_on_where_that_of_a_bamboo_that_counted_from_0_has_come_to(store):
    """It was given steps 0 and 1, which are 1 and 2 now, and the evaluation of the state after one step."""
    Path(store.url).mkdir()
    (Path(store.url) / "logger-l0.json").write_bytes(b'{"attempt":1,"step":1,"events":{"s":1}}')
    kept = Kept()
    happened = EventRecord(attempt=1, time=101.0, reason="R", message="m", source="s", number=1)
    store.add(None, step(1), evaluated(1, x=0.5), step(2), happened, evaluated(2, x=0.25), step(3))
    for _ in range(2):  # what it writes itself is of the newest version
        threads = store.threads(kept.make)
        threads.close(PATIENCE)
        assert kept.given == [evaluated(2, x=0.25), step(3)]
