"""What is wrong with a plan is named."""

import msgspec

from bamboo_core.job.spec import RedundancySpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import plan_problems
from replica_kit import peer, training


def test_problems_of_a_plan_are_named() -> None:
    plan = initial_plan([peer("a"), peer("b")], ((0, 1), (1, 2)), 1, training(4), RedundancySpec())
    assert plan_problems(plan) == []
    broken = msgspec.structs.replace(plan, workers=(peer("a"),), stages=((0, 1), (2, 3)))
    assert len(plan_problems(broken)) == 3
