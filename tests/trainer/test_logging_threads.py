"""Loggers wait in threads of their own, and nobody waits for them."""

from bamboo.control.protocol import WorkerWarning
from bamboo.history.records import EventRecord, StepRecord
from bamboo_trainer.worker.history import logging_threads
from logger_kit import Kept, step, until

pytest_plugins = ["logger_fixtures"]


def test_a_logger_gets_everything_once_and_the_next_root_goes_on(store):
    kept = Kept()
    store.add(None, step(0), step(1))
    first = store.threads(kept.make)
    store.add(first, step(2), EventRecord(attempt=1, time=101.0, reason="R", message="m", source="s", number=1))
    until(lambda: len(kept.given) == 4)
    first.close()
    store.add(None, step(3))  # written, and given to nobody
    second = store.threads(kept.make)
    store.add(second, step(4))
    until(lambda: len(kept.given) >= 6)
    second.close()
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
    threads.close()
    assert store.told == [WorkerWarning(reason="LoggerFailed", message="the logger l0: ConnectionError: no such host")]


def test_a_logger_that_hangs_holds_nobody_up(store, monkeypatch):
    monkeypatch.setattr(logging_threads, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(logging_threads, "CLOSE_SECONDS", 0.05)
    stuck = Kept()
    stuck.mood = "hangs"
    store.add(None, step(0))
    threads = store.threads(stuck.make)
    until(lambda: store.told)
    for number in range(1, 50):
        threads.give([step(number)])
    threads.close()
    assert [message.reason for message in store.told] == ["LoggerFailed"]
    stuck.go_on.set()
