"""The states that simulated workers hold, and how long copies take."""

import msgspec
import pytest

from bamboo.simulation.job.held_states import HeldStates
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.names import STATE_RATE
from bamboo_core.planning.plan import Cell
from replica_kit import planned
from strategy_kit import profile

PLAN = planned(2, 1, 1, "a")
FIRST, SECOND = (PLAN.at(Cell(0, s)).owner for s in range(2))
STATE = 2 * STATE_RATE  # bytes of a layer


def held() -> HeldStates:
    made = HeldStates(profile(2, state=STATE))
    made.begin(PLAN)
    return made


def test_at_first_everybody_has_what_the_plan_says() -> None:
    states = held()
    assert (states.of(FIRST), states.of(SECOND), states.of("stranger")) == ({0, 1}, {0, 1}, set())
    assert states.follow(PLAN, 7.0) == []
    assert states.bytes_of(range(2)) == 2 * STATE


def test_states_travel_one_after_the_other_from_their_owner() -> None:
    states = held()
    more = ("n0", "n1")
    row = tuple(msgspec.structs.replace(a, replicas=(*a.replicas, *more)) for a in PLAN.pipelines[0])
    workers = (*PLAN.workers, *(msgspec.structs.replace(PLAN.workers[0], worker=name) for name in more))
    after = msgspec.structs.replace(PLAN, epoch=2, pipelines=(row,), workers=workers)
    coming = states.follow(after, 100.0)
    assert [(one.worker, one.stage, one.at, one.transfer.sender) for one in coming] == [
        ("n0", 0, 102.0, FIRST),
        ("n1", 0, 104.0, FIRST),
        ("n0", 1, 102.0, SECOND),
        ("n1", 1, 104.0, SECOND),
    ]
    assert states.follow(after, 101.0) == [], "they are on their way"
    assert not states.has("n0", 0)
    assert states.arrived("n0", 0, 102.0)
    assert states.has("n0", 0)
    assert not states.arrived("n0", 0, 102.0), "once"
    states.lose("n1")
    assert not states.arrived("n1", 1, 104.0)


def test_what_the_plan_takes_away_is_forgotten() -> None:
    states = held()
    row = tuple(msgspec.structs.replace(a, replicas=()) for a in PLAN.pipelines[0])
    states.follow(msgspec.structs.replace(PLAN, pipelines=(row,)), 0.0)
    assert (states.of(FIRST), states.of(SECOND)) == ({0}, {1})


def test_a_beginning_costs_only_what_a_worker_does_not_have() -> None:
    states = HeldStates(profile(2, state=STATE, flow=STATE / 5))
    assert states.beginning(PLAN) == (dict.fromkeys(PLAN.worker_ids(), 0.0), [])
    restored = msgspec.structs.replace(PLAN, restore=CheckpointId(step=3, id="a"))
    times, transfers = states.beginning(restored)
    assert times == pytest.approx(dict.fromkeys(PLAN.worker_ids(), 10.0)), "two layers from the store"
    assert transfers == []
    moved = msgspec.structs.replace(restored, sources=((FIRST,), (FIRST, SECOND)))
    times, transfers = states.beginning(moved)
    assert (times[FIRST], times[SECOND]) == pytest.approx((0.0, 5.0))
    assert [(one.sender, one.receiver) for one in transfers] == [(FIRST, SECOND)]
