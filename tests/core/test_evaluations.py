"""Evaluations: the state with the best value, and the number of evaluations after it."""

import pytest

from bamboo_core.control.evaluations import best, course
from bamboo_core.job.training_spec import EvaluationSpec, Goal


@pytest.mark.parametrize(
    ("goal", "values", "best_state", "without"),
    [
        (Goal.MIN, [3.0, 2.0, 2.5, 2.0], 20, 2),
        (Goal.MAX, [3.0, 2.0, 4.0], 30, 0),
        (Goal.MIN, [None, None], None, 2),
        (Goal.MIN, [None, 5.0, None], 20, 1),
    ],
)
def test_the_best_state_is_the_first_with_the_best_value(
    goal: Goal, values: list[float | None], best_state: int | None, without: int
) -> None:
    spec = EvaluationSpec(every_steps=10, goal=goal)
    found = {10 * (i + 1): {"loss": value, "other": 0.0} for i, value in enumerate(values)}
    assert (best(spec, found), course(spec, found).without) == (best_state, without)
