"""Callbacks: each record counts once, in order, in a callback's state, saved with its position in the history."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from bamboo_core.control.protocol import WorkerFailed, WorkerWarning
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.records import EventRecord
from bamboo_trainer.callbacks import Callback
from bamboo_trainer.worker.followers import CallbackFollower, Cursor, TurnThread, facts_of
from bamboo_trainer.worker.history_keeper import HistoryKeeper, Rates
from history_keeper_kit import plan
from logger_kit import Store, evaluated, step
from waiting import PATIENCE, until

pytest_plugins = ["logger_kit"]


class Seen(Callback):
    """A callback that records its calls, and raises at a chosen one."""

    raises: ClassVar[str] = ""
    all: ClassVar[list[str]] = []

    def __init__(self, facts: Any) -> None:
        super().__init__(facts)
        self.seen: list[str] = []

    def _see(self, what: str) -> None:
        if what == self.raises:
            raise ZeroDivisionError("as it was told")
        self.seen.append(what)
        self.all.append(what)

    def on_step(self, step: Any) -> None:
        self._see(f"{step.attempt}:{step.step}")

    def on_evaluation(self, evaluation: Any) -> None:
        self._see(f"evaluation {evaluation.attempt}:{evaluation.step}")

    def on_checkpoint(self, step: int) -> None:
        self._see(f"checkpoint {step}")

    def on_disruption(self, event: EventRecord) -> None:
        self._see(event.reason)

    def on_end(self, steps: int) -> None:
        self._see(f"end {steps}")

    def state_dict(self) -> Any:
        return self.seen

    def load_state_dict(self, state: Any) -> None:
        self.seen = state


class Strict(Seen):
    fails_job = True


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "raises", "")
    monkeypatch.setattr(Seen, "all", [])


def calls(told: list[Any], make: Callable[..., Any] = Seen) -> CallbackFollower:
    return CallbackFollower("mine", make, facts_of("job", "/h"), HistoryFiles("/h"), told.append, TurnThread)


def event(number: int, reason: str, message: str = "m") -> EventRecord:
    return EventRecord(attempt=1, time=101.0, reason=reason, message=message, source="s", number=number)


def kept(store: Store) -> Any:
    return json.loads((Path(store.url) / "callback-mine.json").read_bytes())


def test_it_hears_of_everything_once_and_the_next_root_goes_on(store: Store) -> None:
    saved = event(2, "CheckpointSaved", "the state of step 2 is saved, in 0.1 s")
    store.add(None, step(1), event(1, "WorkerLost"), evaluated(1, loss=0.5), step(2), saved, event(3, "WorkerJoined"))
    first = store.followers(mine=Seen)
    first.close(PATIENCE)
    store.add(None, step(3))  # written, and told to nobody
    second = store.followers(mine=Seen)
    store.add(second, step(3), step(4))  # the next root has written one again
    until(second.complete)
    assert second.complete(), "a root says so again after a reconnection"
    second.close(PATIENCE)
    expected = ["1:1", "WorkerLost", "evaluation 1:1", "1:2", "checkpoint 2", "1:3", "1:4", "end 4"]
    assert sorted(Seen.all) == sorted(expected)
    assert kept(store)["state"] == Seen.all, "what it keeps goes on, too"
    assert [one for one in Seen.all if ":" in one and " " not in one] == ["1:1", "1:2", "1:3", "1:4"]
    assert store.told == []


def test_a_frozen_root_does_not_take_back_what_the_next_one_has_saved(store: Store) -> None:
    """A frozen root, which believes that it leads, wakes after the next root has called `on_end`, and saves nothing."""
    store.add(None, step(1))
    frozen = store.followers(mine=Seen)
    until(lambda: (Path(store.url) / "callback-mine.json").exists() and kept(store)["state"] == ["1:1"])
    following = store.followers(mine=Seen)
    store.add(following, step(2))
    until(following.complete)
    following.close(PATIENCE)
    store.add(frozen)
    frozen.close(PATIENCE)
    assert kept(store)["state"] == ["1:1", "1:2", "end 2"]
    assert store.told == []


def test_one_who_is_lost_in_the_middle_leaves_nothing_twice_in_what_it_keeps() -> None:
    """After a root's loss, the next root repeats the callback's calls that came after its last saved state."""
    first = calls([])
    reached_then = first.write([step(1), step(2)], Cursor())
    first.write([step(3)], reached_then)  # and lost before that is written
    after = calls([]).write([step(3), step(4)], reached_then)
    assert after.state == ["1:1", "1:2", "1:3", "1:4"]
    assert Seen.all == ["1:1", "1:2", "1:3", "1:3", "1:4"]


def test_back_at_a_checkpoint_that_nobody_told_of_it_keeps_what_led_to_that() -> None:
    """After a return to the state of step 4, which has no record, a callback keeps its state of the steps before it."""
    mine = calls([])
    after = mine.write([step(1, checkpoint=True), step(2), step(3)], Cursor())
    assert mine.write([step(5, attempt=2)], after).state == ["1:1", "1:2", "1:3", "2:5"]


def test_back_at_a_checkpoint_it_has_what_it_kept_then() -> None:
    mine = calls([])
    after = mine.write([step(1), step(2, checkpoint=True), step(3), step(4, checkpoint=True), step(5)], Cursor())
    again = mine.write([step(3, attempt=2)], after)
    assert again.state == ["1:1", "1:2", "2:3"]
    assert list(again.at) == [2], "what was kept after it is another attempt's"
    evaluation = msgspec.structs.replace(evaluated(2, loss=1.0), attempt=3)
    third = mine.write([evaluation, step(3, attempt=3)], again)
    assert third.state == ["1:1", "1:2", "evaluation 3:2", "3:3"]
    assert mine.write([step(2, attempt=4)], third).state == ["4:2"], "before all that it knows it begins anew"


def test_an_attempt_that_repeats_nothing_goes_on() -> None:
    mine = calls([])
    after = mine.end(mine.write([step(1), step(2)], Cursor()))
    longer = mine.write([step(3, attempt=2)], after)
    assert longer.state == ["1:1", "1:2", "end 2", "2:3"]
    assert mine.end(longer).state[-1] == "end 3"


def test_an_exception_is_told_with_its_place_and_switches_it_off_until_the_job_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Seen, "raises", "1:2")
    told: list[Any] = []
    after = calls(told).write([step(1, checkpoint=True), step(2), step(3)], Cursor())
    (warning,) = told
    assert isinstance(warning, WorkerWarning)
    assert warning.reason == "CallbackFailed"
    assert warning.message.startswith(
        "the callback mine, in on_step, of step 2, raised ZeroDivisionError: as it was told (tests/trainer/test_follow"
    )
    assert warning.message.endswith(", in _see); it is not called any more")
    after = calls(told).write([step(4), event(1, "WorkerLost")], after)
    after = calls(told).end(after)
    assert Seen.all == ["1:1"], "nor by the next root"
    assert (after.step, len(told)) == (4, 1)
    anew = calls(told).write([step(2, attempt=2)], after)
    assert anew.state == ["1:1", "2:2"]


def test_one_that_may_end_the_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "raises", "end 1")
    told: list[Any] = []
    mine = calls(told, Strict)
    mine.end(mine.write([step(1)], Cursor()))
    (failed,) = told
    assert isinstance(failed, WorkerFailed)
    assert failed.reason == "CallbackFailed"
    assert failed.message.startswith("the callback mine, in on_end, after step 1, raised ZeroDivisionError")


class Unkept(Callback):
    state: ClassVar[Any] = None

    def state_dict(self) -> Any:
        return self.state

    def on_step(self, step: Any) -> None:
        """Do nothing: only `state_dict` matters here."""


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("x" * 70_000, "in state_dict, after step 1, raised ValueError: it keeps 70002 bytes, at most 65536"),
        (object(), "in state_dict, after step 1, raised TypeError: Encoding objects of type object is unsupported"),
    ],
)
def test_what_cannot_be_kept_is_told(state: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unkept, "state", state)
    told: list[Any] = []
    calls(told, Unkept).write([step(1)], Cursor())
    assert said in told[0].message


def test_what_is_no_callback_is_told() -> None:
    told: list[Any] = []
    calls(told, lambda facts: 3).write([step(1)], Cursor())
    assert "in on_step, of step 1, raised TypeError: made int, expected a bamboo_trainer.callbacks" in told[0].message


def test_who_waits_for_the_end_does_not_wait_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training ends although a callback hangs, and at once if there are no callbacks."""
    monkeypatch.setattr("bamboo_trainer.worker.history_keeper.HELD_SECONDS", 0.05)
    go_on, done = threading.Event(), threading.Event()

    class Hangs(Callback):
        def on_step(self, step: Any) -> None:
            assert go_on.wait(PATIENCE)

    store.add(None, step(1))
    hanging = store.followers(leads=False, mine=Hangs)
    keeper = HistoryKeeper(HistoryFiles(store.url), Rates(batch=1), store.told.append, hanging.all)
    keeper.take_role(plan(1), True)
    keeper.informed()
    until(lambda: keeper.when_written(done.set, complete=True) or done.wait(0.1))
    go_on.set()
    keeper.close(PATIENCE, PATIENCE)
    assert store.followers().complete()
