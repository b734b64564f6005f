"""Loggers, which follow the history in threads of their own; only a job's end waits for them, for a limited time."""

from bamboo_core.control.protocol import WorkerWarning
from bamboo_trainer.worker import followers
from logger_kit import Kept, step
from waiting import PATIENCE, until

pytest_plugins = ["logger_kit"]


def test_a_logger_that_fails_is_told_once_and_gets_what_it_missed(store, monkeypatch):
    monkeypatch.setattr(followers, "AGAIN_SECONDS", 0.01)
    bad, good = Kept(), Kept()
    bad.mood = "fails"
    store.add(None, step(0))
    both = store.followers(bad.make, good.make)
    until(lambda: store.told)
    store.add(both, step(1))
    until(lambda: len(good.given) == 2)
    bad.mood = ""
    until(lambda: len(bad.given) == 2)
    both.close(PATIENCE)
    assert store.told == [WorkerWarning(reason="LoggerFailed", message="the logger l0: ConnectionError: no such host")]


def test_a_logger_that_hangs_holds_nobody_up(store):
    stuck = Kept()
    stuck.mood = "hangs"
    store.add(None, step(0))
    hung = store.followers(stuck.make)
    hung.close(0.05)
    (incomplete,) = store.told
    assert incomplete.reason == "LoggerIncomplete"
    assert "the logger l0 has not finished, and may lack the last steps" in incomplete.message
    stuck.go_on.set()


def test_the_end_tells_for_what_it_waits_and_what_is_missing_although_the_logger_has_taken_all(store):
    """A job's end waits until loggers are closed: some write in a process of their own, which ends only then."""
    kept = Kept()
    kept.mood = "closes badly"
    store.add(None, step(0))
    idle = store.followers(Kept().make, leads=False)
    idle.announce_end(7.0)
    idle.close(PATIENCE)
    assert store.told == [], "this worker has not written the history"
    led = store.followers(kept.make)
    until(lambda: kept.given)
    led.announce_end(7.0)
    led.close(PATIENCE)
    awaited, failed, incomplete = store.told
    assert (awaited.reason, awaited.message) == (
        "LoggersAwaited",
        "waiting up to 7 s for the logger l0 to take all of the history",
    )
    assert failed.reason == "LoggerFailed"
    assert incomplete.reason == "LoggerIncomplete"


def test_who_is_the_root_no_longer_leaves_the_logger_to_the_next_one_and_may_come_back(store):
    """A former root closes its logger for the next root, since only one logger may write into a run at a time."""
    first, second = Kept(), Kept()
    store.add(None, step(0))
    mine, other = store.followers(first.make), store.followers(second.make, leads=False)
    until(lambda: first.given)
    mine.lead(False)
    until(lambda: first.closed)
    store.add(None, step(1))
    other.lead(True)
    until(lambda: second.given)
    other.lead(False)
    until(lambda: second.closed)
    store.add(None, step(2))
    mine.lead(True)
    mine.announce_end(7.0)
    mine.close(PATIENCE)
    other.announce_end(7.0)
    other.close(PATIENCE)
    assert [record.step for record in first.given] == [0, 2]
    assert [record.step for record in second.given] == [1]
    assert [message.reason for message in store.told] == ["LoggersAwaited"], "only the root is waited for"
