"""Which plan a worker obeys, and which one waits for its step boundary."""

import msgspec

from bamboo_core.planning.plan import Plan
from bamboo_trainer.routing.plan_state import PlanState
from replica_kit import planned

FIRST = planned(2, 1, 1, "a")


def plan(epoch: int, *, boundary: bool = False) -> Plan:
    return msgspec.structs.replace(FIRST, epoch=epoch, boundary=boundary)


def test_a_newer_plan_overtakes_the_one_that_waits() -> None:
    state = PlanState("w0", plan(1))
    state.offer(plan(2, boundary=True))
    state.activate(plan(3))
    assert state.pending is None
    state.offer(plan(5, boundary=True))
    state.activate(plan(4))
    assert state.pending is not None
