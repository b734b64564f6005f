"""What evaluations say of a training."""

import pytest

from bamboo_core.control.evaluations import best, course
from bamboo_core.job.training_spec import EvaluationSpec, Goal


@pytest.mark.parametrize(
    ("goal", "delta", "values", "best_state", "without"),
    [
        (Goal.MIN, 0.0, [3.0, 2.0, 2.5, 2.0], 20, 2),
        (Goal.MAX, 0.0, [3.0, 2.0, 4.0], 30, 0),
        (Goal.MIN, 0.5, [3.0, 2.8, 2.6, 2.4], 40, 0),
        (Goal.MIN, 0.5, [3.0, 2.8, 2.6], 10, 2),
        (Goal.MIN, 0.0, [None, None], None, 2),
        (Goal.MIN, 0.0, [None, 5.0, None], 20, 1),
    ],
)
def test_the_best_state_is_better_by_the_least_difference(
    goal: Goal, delta: float, values: list[float | None], best_state: int | None, without: int
) -> None:
    spec = EvaluationSpec(every_steps=10, goal=goal, min_delta=delta)
    found = {10 * (i + 1): {"loss": value, "other": 0.0} for i, value in enumerate(values)}
    assert (best(spec, found), course(spec, found).without) == (best_state, without)
