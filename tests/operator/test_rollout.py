"""The decisions of a rollout: when the operator replaces each outdated worker, and when the rollout stalls."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_operator.pods.rollout import (
    ALONE,
    NOTHING,
    READY_SECONDS,
    RolloutRecord,
    RolloutState,
    RolloutStep,
    RolloutView,
    RolloutWorker,
    next_step,
    observed,
    released,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def old(number: int, **more: Any) -> RolloutWorker:
    return RolloutWorker(name=f"w{number}", updated=False, **{"ready": True, **more})


def new(number: int, **more: Any) -> RolloutWorker:
    return RolloutWorker(name=f"w{number}", updated=True, **{"ready": True, **more})


def view(*workers: RolloutWorker, wanted: int = 2, **more: Any) -> RolloutView:
    facts = {"begun": True, "training": True, "held": True, **more}
    return RolloutView(revision="r2", workers=workers, wanted=wanted, **facts)


def record_of(seen: RolloutView, before: RolloutRecord | None = None, now: float = 0.0) -> RolloutRecord:
    return observed(before, seen, now, NOW)


def step_of(seen: RolloutView, before: RolloutRecord | None = None, now: float = 0.0) -> RolloutStep:
    return next_step(record_of(seen, before, now), seen)


def release(worker: str) -> RolloutStep:
    return RolloutStep(release=worker)


def delete(worker: str) -> RolloutStep:
    return RolloutStep(delete=worker)


@pytest.mark.parametrize(
    ("seen", "step"),
    [
        (view(new(0), new(1)), NOTHING),
        (view(old(0), old(1)), release("w0")),
        (view(old(0), old(1, idle=True)), release("w1")),
        (view(new(2), old(1)), release("w1")),
        (view(old(0), new(2, ready=False)), NOTHING),
        (view(old(0), old(1), new(2, ready=False), wanted=3), NOTHING),
        (view(old(0), old(1), new(2, ready=False, placed=False), wanted=3), release("w0")),  # it grows when it can
        (view(old(0, ready=False, leaving=True), old(1), new(2)), NOTHING),
        (view(old(0), old(1), held=False), NOTHING),
        (view(old(0), old(1), training=False), NOTHING),
        (view(old(0), wanted=2), NOTHING),
        (view(old(0), wanted=1), NOTHING),
        (view(old(0, ready=False), old(1, ready=False), begun=False), delete("w0")),
        (view(old(0), old(1, ready=False, placed=False)), delete("w1")),
        (view(old(0, ready=False, leaving=True), old(1, ready=False)), delete("w1")),
        (view(old(0), old(1), old(2, ready=False)), delete("w2")),  # of an edit before this one
        (view(old(0), old(1), futile="no"), NOTHING),
    ],
)
def test_one_thing_at_a_time(seen: RolloutView, step: RolloutStep) -> None:
    assert step_of(seen) == step


STALLS = [
    ({"futile": "torch 3 instead of 2"}, 0.0, "torch 3 instead of 2"),
    (
        {"failures": ("w2 exited with code 1",) * 3},
        0.0,
        "3 new workers have ended by themselves; w2 exited with code 1",
    ),
    ({"problem": "no such image"}, READY_SECONDS, "a new worker was not ready within 600 s: no such image"),
    ({}, READY_SECONDS, "a new worker was not ready within 600 s: it has not joined, or its task is not loaded"),
]


@pytest.mark.parametrize(("facts", "after", "why"), STALLS, ids=[why for _, _, why in STALLS])
def test_it_stops_by_itself_and_says_why(facts: dict[str, Any], after: float, why: str) -> None:
    begun = released(record_of(view(old(0), old(1))))
    waiting = view(old(1), new(2, ready=False), **facts)
    begun = record_of(view(old(1)), begun)
    assert record_of(waiting, begun, after - 2).state is (RolloutState.PROGRESSING if after else RolloutState.STALLED)
    stalled = record_of(waiting, begun, after + 1)
    assert (stalled.state, stalled.stalled) == (RolloutState.STALLED, why)
    assert stalled.message == f"0 of 2 workers are of revision r2; the others stay: {why}"
    for later in (waiting, view(old(1)), view(old(1), new(2))):
        assert record_of(later, stalled, after + 9).stalled == why, "it does not begin again by itself"
        assert step_of(later, stalled, after + 9) == NOTHING


def test_a_job_of_one_worker_says_that_nobody_can_take_over() -> None:
    assert record_of(view(old(0), wanted=1)).stalled == ALONE
    assert record_of(view(old(0, ready=False), wanted=1, begun=False)).stalled == ""


@pytest.mark.parametrize("change", ["undo", "other", "pool"])
def test_what_gets_it_going_again(change: str) -> None:
    stalled = record_of(view(old(0), old(1), futile="no", templates=frozenset("a")))
    seen = view(old(0), old(1), templates=frozenset("a"))
    if change == "undo":
        seen = replace(view(new(0), new(1)), revision="r1")
        assert record_of(seen, stalled).state is RolloutState.COMPLETE
        return
    seen = replace(seen, revision="r3") if change == "other" else replace(seen, templates=frozenset("b"))
    assert step_of(seen, stalled) == release("w0")


def test_the_time_in_which_nobody_waits_for_a_new_worker_does_not_count() -> None:
    """Only time in which the rollout waits for a new worker counts towards READY_SECONDS, not a wait for replicas."""
    record = record_of(view(old(0), old(1)))
    for now in range(0, 10_000, 100):
        record = record_of(view(old(0), old(1), held=False), record, now)
        record = record_of(view(old(0, ready=False, leaving=True), old(1), new(2)), record, now)
    assert record.state is RolloutState.PROGRESSING


def test_another_operator_goes_on_where_the_one_before_it_was() -> None:
    began = NOW - timedelta(hours=1)
    record = record_of(view(old(0), new(1), since=began))
    assert (record.state, record.since) == (RolloutState.PROGRESSING, began)
    assert step_of(view(old(0), new(1, ready=False), since=began)) == NOTHING
    assert record_of(view(new(0), new(1))).state is RolloutState.COMPLETE


class Cluster:
    """A cluster whose workers come and go as the decisions say. broken: new workers never become ready."""

    def __init__(self, size: int, *, broken: bool) -> None:
        self.workers = {f"w{n}": old(n) for n in range(size)}
        self.made, self.size, self.broken = size, size, broken
        self.record: RolloutRecord | None = None
        self.now = 0.0
        self.least = size  # the fewest ready workers so far

    def turn(self, choice: int) -> None:
        self.now += 1.0
        seen = view(*self.workers.values(), wanted=self.size)
        self.record = observed(self.record, seen, self.now, NOW)
        step = next_step(self.record, seen)
        if step.delete is not None:
            del self.workers[step.delete]
        if step.release is not None:
            self.record = released(self.record)
            self.workers[step.release] = replace(self.workers[step.release], ready=False, leaving=True)
        for _ in range(self.size - sum(not w.leaving for w in self.workers.values())):
            self.workers[f"w{self.made}"] = new(self.made, ready=False, placed=False)
            self.made += 1
        self.go_on(choice)

    def go_on(self, choice: int) -> None:
        """Give one worker a node, make one ready (odd `choice`), remove a leaving one (unless 3 divides `choice`)."""
        if waiting := [w for w in self.workers.values() if not w.placed]:
            self.workers[waiting[0].name] = replace(waiting[0], placed=True)
        starting = [w for w in self.workers.values() if w.placed and not w.ready and not w.leaving]
        placed = [w for w in starting if not (self.broken and w.updated)]
        if placed and choice % 2:
            self.workers[placed[0].name] = replace(placed[0], ready=True)
        leaving = [w.name for w in self.workers.values() if w.leaving]
        if leaving and choice % 3:
            del self.workers[leaving[0]]
        self.least = min(self.least, sum(w.ready for w in self.workers.values()))


@settings(max_examples=150, deadline=None)
@given(size=st.integers(2, 5), broken=st.booleans(), choices=st.lists(st.integers(0, 11), min_size=1, max_size=60))
def test_however_it_goes_it_ends_and_never_takes_more_than_one_worker(
    size: int, broken: bool, choices: list[int]
) -> None:
    cluster = Cluster(size, broken=broken)
    for choice in choices:
        cluster.turn(choice)
    for turn in range(3000):
        cluster.turn(1 + turn % 2)
        assert cluster.record is not None
        if cluster.record.state is not RolloutState.PROGRESSING:
            break
    assert cluster.record is not None
    assert cluster.least >= size - 1
    if broken:
        assert cluster.record.state is RolloutState.STALLED
        assert sum(w.ready for w in cluster.workers.values()) == size - 1
    else:
        assert cluster.record.state is RolloutState.COMPLETE
        assert all(w.updated and w.ready for w in cluster.workers.values())
