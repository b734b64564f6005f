"""When which worker is replaced by one of the newest template: the decisions alone."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.job.status import RolloutStatus
from bamboo_operator.pods.rollouts.rollout import (
    NO_ROOM_SECONDS,
    NOTHING,
    Act,
    RolloutRecord,
    RolloutState,
    RolloutStep,
    RolloutView,
    RolloutWorker,
    makes_newest,
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
    facts = {"begun": True, "training": True, "held": True, "leaving": False, **more}
    return RolloutView(revision="r2", workers=workers, wanted=wanted, **facts)


def record_of(seen: RolloutView, before: RolloutRecord | None = None, now: float = 0.0) -> RolloutRecord:
    return observed(before, seen, now, NOW)


def step_of(seen: RolloutView, before: RolloutRecord | None = None, now: float = 0.0) -> RolloutStep:
    return next_step(record_of(seen, before, now), seen)


SURGE = RolloutStep(Act.SURGE)


@pytest.mark.parametrize(
    ("seen", "step"),
    [
        (view(new(0), new(1)), NOTHING),
        (view(old(0), old(1)), SURGE),
        (view(old(0), old(1), new(2, ready=False)), NOTHING),
        (view(old(0), old(1), new(2, ready=False, placed=False)), NOTHING),
        (view(old(0), old(1), new(2)), RolloutStep(Act.RELEASE, "w0")),
        (view(old(0), old(1, idle=True), new(2)), RolloutStep(Act.RELEASE, "w1")),
        (view(new(2), old(1)), SURGE),
        (view(old(0), old(1), new(2), leaving=True), NOTHING),
        (view(old(0), old(1), new(2), held=False), NOTHING),
        (view(old(0), old(1), held=False), NOTHING),
        (view(old(0), old(1), training=False), NOTHING),
        (view(old(0), old(1), paused=True), NOTHING),
        (view(old(0), old(1), new(2), paused=True), NOTHING),
        (view(old(0), old(1), new(2, ready=False), paused=True), RolloutStep(Act.DELETE, "w2")),
        (view(old(0), new(2, ready=False), paused=True), NOTHING),
        (view(old(0), old(1), max_surge=0), RolloutStep(Act.RELEASE, "w0")),
        (view(old(0), wanted=1, max_surge=0), NOTHING),
        (view(old(0), old(1), no_room=NO_ROOM_SECONDS + 1), RolloutStep(Act.RELEASE, "w0")),
        (view(old(0, ready=False), old(1, ready=False), begun=False), RolloutStep(Act.DELETE, "w0")),
        (view(old(0), old(1, ready=False, placed=False)), SURGE),
        (view(old(0), old(1, ready=False, placed=False), new(2)), RolloutStep(Act.DELETE, "w1")),
        (view(old(0), old(1), old(2, ready=False)), RolloutStep(Act.DELETE, "w2")),  # of an edit before this one
        (view(old(0), old(1), new(2, ready=False), futile="no"), RolloutStep(Act.DELETE, "w2")),
        (view(old(0), old(1), futile="no"), NOTHING),
    ],
    ids=lambda value: str(value.act) if isinstance(value, RolloutStep) else "",
)
def test_one_thing_at_a_time(seen: RolloutView, step: RolloutStep) -> None:
    assert step_of(seen) == step


def test_where_an_old_one_goes_first_the_next_goes_when_another_new_one_is_ready() -> None:
    """Though every stage is held twice meanwhile, and no stage has to share a worker, as after shrinking."""
    workers = [old(0), old(1), old(2), old(3)]
    record = record_of(view(*workers, wanted=4, max_surge=0))
    for number in (0, 1):
        seen = view(*workers, wanted=4, max_surge=0)
        record = record_of(seen, record)
        assert next_step(record, seen) == RolloutStep(Act.RELEASE, f"w{number}")
        record = released(record)
        workers.pop(0)
        for waits in ([], [new(4 + number, ready=False, placed=False)], [new(4 + number, ready=False)]):
            seen = view(*workers, *waits, wanted=4, max_surge=0)
            assert step_of(seen, record) == NOTHING
        workers.append(new(4 + number))


STALLS = [
    ({"futile": "torch 3 instead of 2"}, 0.0, "torch 3 instead of 2"),
    (
        {"failures": ("w2 exited with code 1",) * 3},
        0.0,
        "3 new workers have ended by themselves; w2 exited with code 1",
    ),
    ({"problem": "no such image"}, 601.0, "a new worker was not ready within 600 s: no such image"),
    ({"refused": "no quota", "deadline": 30.0}, 31.0, "a new worker was not ready within 30 s: no quota"),
]


@pytest.mark.parametrize(("facts", "after", "why"), STALLS, ids=[why for _, _, why in STALLS])
def test_it_stops_by_itself_and_says_why(facts: dict[str, Any], after: float, why: str) -> None:
    workers = (old(0), old(1), new(2, ready=False))
    begun = record_of(view(*workers))
    waiting = view(*workers, **facts)
    assert record_of(waiting, begun, after - 2).state is (RolloutState.PROGRESSING if after else RolloutState.STALLED)
    stalled = record_of(waiting, begun, after)
    assert (stalled.state, stalled.stalled) == (RolloutState.STALLED, why)
    assert stalled.message == f"0 of 2 workers are of revision r2; the others stay: {why}"
    assert next_step(stalled, waiting) == RolloutStep(Act.DELETE, "w2")
    assert not makes_newest(stalled, waiting)
    left = view(old(0), old(1))
    assert record_of(left, stalled, after + 9).stalled == why, "it does not begin again by itself"
    assert step_of(left, stalled, after + 9) == NOTHING


def test_one_that_has_stopped_decides_nothing_more_as_time_goes_by() -> None:
    """Its pod is still refused for want of room when an old worker would have gone first, which nobody waits for."""
    waiting = view(old(0), old(1), refused="no room", deadline=NO_ROOM_SECONDS / 2)
    stalled = record_of(waiting, record_of(waiting), NO_ROOM_SECONDS)
    assert stalled.state is RolloutState.STALLED
    late = replace(waiting, no_room=NO_ROOM_SECONDS + 1)
    assert record_of(late, stalled, 2 * NO_ROOM_SECONDS) == stalled
    assert step_of(replace(late, section="b"), replace(stalled, section="a")) == RolloutStep(Act.RELEASE, "w0")


@pytest.mark.parametrize("change", ["undo", "other", "section", "pause"])
def test_what_gets_it_going_again(change: str) -> None:
    stalled = record_of(view(old(0), old(1), futile="no", section="a"))
    seen = view(old(0), old(1), section="a")
    if change == "undo":
        seen = replace(view(new(0), new(1)), revision="r1")
        assert record_of(seen, stalled).state is RolloutState.COMPLETE
        return
    if change == "pause":
        stalled = record_of(replace(seen, paused=True), stalled)
        assert stalled.state is RolloutState.PAUSED
    elif change == "other":
        seen = replace(seen, revision="r3")
    else:
        seen = replace(seen, section="b")
    assert step_of(seen, stalled) == SURGE


def test_the_time_in_which_nobody_waits_for_a_new_worker_does_not_count() -> None:
    """Such as while stages are copied after a loss."""
    record = record_of(view(old(0), old(1)))
    for now in range(0, 10_000, 100):
        record = record_of(view(old(0), old(1), held=False), record, now)
        record = record_of(view(old(0), old(1), new(2), leaving=True), record, now)
    assert record.state is RolloutState.PROGRESSING


@pytest.mark.parametrize(
    ("seen", "newest"),
    [
        (view(old(0), old(1)), False),
        (view(old(0), new(2, ready=False)), False),
        (view(old(0), new(2)), True),
        (view(old(0), new(2), paused=True), True),
        (view(old(0, ready=False), new(2, ready=False)), True),
        (view(old(0), old(1), max_surge=0), True),
        (view(old(0), old(1), max_surge=0, paused=True), False),
        (view(old(0), new(2), futile="no"), False),
    ],
)
def test_a_missing_worker_is_made_as_it_is_known_to_work(seen: RolloutView, newest: bool) -> None:
    assert makes_newest(record_of(seen), seen) is newest


def test_another_operator_goes_on_where_the_one_before_it_was() -> None:
    for seen in (view(old(0), new(1)), view(new(0), new(1)), view(old(0), old(1), futile="no")):
        record = record_of(seen)
        found = RolloutRecord.of(record.status(), 99.0)
        assert found is not None
        assert (found.state, found.revision, found.since, found.stalled) == (
            record.state,
            record.revision,
            record.since,
            record.stalled,
        )
    assert RolloutRecord.of(RolloutStatus(), 0.0) is None
    assert RolloutRecord.of(None, 0.0) is None


class Cluster:
    """Workers that come and go as the decisions say. room: for pods. broken: new ones never become ready."""

    def __init__(self, size: int, room: int, *, broken: bool) -> None:
        self.workers = {f"w{n}": old(n) for n in range(size)}
        self.made, self.size, self.room, self.broken = size, size, room, broken
        self.leaving: str | None = None
        self.record: RolloutRecord | None = None
        self.now = 0.0
        self.unplaced = 0.0
        self.least = size  # ready workers that were there at any time

    def view(self, **more: Any) -> RolloutView:
        return view(
            *self.workers.values(), wanted=self.size, leaving=self.leaving is not None, no_room=self.unplaced, **more
        )

    def make(self, worker: RolloutWorker) -> None:
        self.workers[worker.name] = worker
        self.made += 1

    def turn(self, choice: int, **more: Any) -> RolloutStep:
        self.now += 1.0
        seen = self.view(**more)
        self.record = observed(self.record, seen, self.now, NOW)
        step = next_step(self.record, seen)
        match step.act:
            case Act.SURGE:
                self.make(new(self.made, ready=False, placed=False))
            case Act.DELETE:
                del self.workers[step.worker]
            case Act.RELEASE:
                self.record, self.leaving = released(self.record), step.worker
        seen = self.view(**more)
        for _ in range(self.size + (self.leaving is not None) - len(self.workers)):
            made = new if makes_newest(self.record, seen) else old
            self.make(made(self.made, ready=False, placed=False))
        self.go_on(choice)
        return step

    def go_on(self, choice: int) -> None:
        """One of those that wait gets a node, or is ready; who leaves is gone, now or later."""
        waiting = [w for w in self.workers.values() if not w.placed]
        free = self.room - sum(w.placed for w in self.workers.values())
        self.unplaced = self.unplaced + 1 if waiting else 0.0
        if waiting and free > 0:
            self.workers[waiting[0].name] = replace(waiting[0], placed=True)
        placed = [w for w in self.workers.values() if w.placed and not w.ready and not (self.broken and w.updated)]
        if placed and choice % 2:
            self.workers[placed[0].name] = replace(placed[0], ready=True)
        if self.leaving and choice % 3:
            del self.workers[self.leaving]
            self.leaving = None
        ready = [w for w in self.workers.values() if w.ready and w.name != self.leaving]
        self.least = min(self.least, len(ready))

    def ready(self) -> list[RolloutWorker]:
        return [w for w in self.workers.values() if w.ready]


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(2, 5),
    spare=st.integers(0, 2),
    surge=st.integers(0, 1),
    broken=st.booleans(),
    choices=st.lists(st.integers(0, 11), min_size=1, max_size=60),
    pauses=st.lists(st.booleans(), max_size=60),
)
def test_however_it_goes_it_ends_and_never_takes_more_than_one_worker(
    size: int, spare: int, surge: int, broken: bool, choices: list[int], pauses: Iterable[bool]
) -> None:
    cluster = Cluster(size, size + spare, broken=broken)
    for choice, paused in zip(choices, [*pauses, *[False] * len(choices)], strict=False):
        step = cluster.turn(choice, paused=paused, max_surge=surge)
        assert not (paused and step.act not in (Act.NOTHING, Act.DELETE))
    for turn in range(3000):
        cluster.turn(1 + turn % 2, max_surge=surge)
        assert cluster.record is not None
        if cluster.record.state is not RolloutState.PROGRESSING and len(cluster.ready()) >= size:
            break
    assert cluster.least >= size - 1
    assert cluster.record is not None
    if broken:
        assert cluster.record.state is RolloutState.STALLED
        assert not any(w.updated for w in cluster.workers.values() if w.ready)
    else:
        assert cluster.record.state is RolloutState.COMPLETE
        assert all(w.updated for w in cluster.workers.values())
    assert len(cluster.ready()) >= size
    if surge and spare:
        assert cluster.least == size, "with room for one more nobody has to run two stages"
