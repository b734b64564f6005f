"""How far a training is from its early stop, among the numbers of every layer's state."""

import math
from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.control.evaluations import Course
from bamboo_core.job.training_spec import EvaluationSpec, Goal
from bamboo_trainer.stage.state.early_stop import numbers, of_numbers

SPEC = EvaluationSpec(every_steps=5, patience=3)


@pytest.mark.parametrize("course", [Course(), Course(without=2), Course(10, -0.25, 1)])
def test_what_is_kept_is_found_again_in_any_layers(course: Course) -> None:
    kept = numbers(course, SPEC, range(5))
    assert of_numbers(kept, SPEC, [0, 3]) == course
    assert of_numbers(kept, replace(SPEC, patience=9), [4]) == course


def test_a_state_of_another_job_begins_to_count_anew() -> None:
    kept = numbers(Course(10, -0.25, 1), SPEC, [0])
    for other in (replace(SPEC, metric="accuracy"), replace(SPEC, goal=Goal.MAX)):
        assert of_numbers(kept, other, [0]) == Course()
    assert of_numbers({}, SPEC, [0]) == Course()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("score", None, "must be a state and its score, got 10 and None"),
        ("score", math.nan, "must be a state and its score, got 10 and nan"),
        ("state", 10.0, "must be a state and its score"),
        ("state", -1, "must be a state and its score, got -1"),
        ("without", None, "must be a number of them, got None"),
        ("without", True, "must be a number of them, got True"),
    ],
)
def test_numbers_that_are_no_course_are_refused(key: str, value: Any, said: str) -> None:
    kept = numbers(Course(10, -0.25, 1), SPEC, [0]) | {f"early_stop:0.{key}": value}
    with pytest.raises(ValueError, match="evaluation") as refused:
        of_numbers(kept, SPEC, [0])
    assert said in str(refused.value)


def test_layers_of_different_courses_are_refused() -> None:
    kept = numbers(Course(10, -0.25, 1), SPEC, [0]) | numbers(Course(), SPEC, [1])
    with pytest.raises(ValueError, match="the layers' states have different courses of evaluations"):
        of_numbers(kept, SPEC, [0, 1])
