"""The course of evaluations towards an early stop as a part of the state, so that the last step follows from the job.

Each layer's state has it, so that any split can restore it. It does not affect the model or the state's digest; a state
saved without it, or with another metric, starts counting anew.
"""

import math
import zlib
from collections.abc import Collection, Mapping
from typing import Final

from bamboo_core.control.evaluations import Course
from bamboo_core.job.training_spec import EvaluationSpec

KIND: Final = "early_stop"  # names are "early_stop:3.score"
MOST_STEPS: Final = 2**31

Number = int | float | bool | None


def is_of(name: str) -> bool:
    """Return whether a number with that name belongs to an early stop."""
    return name.startswith(f"{KIND}:")


def numbers(course: Course, spec: EvaluationSpec, layers: Collection[int]) -> dict[str, Number]:
    """Return the numbers by name for the state of each of these layers."""
    values = {"of": _of(spec), "score": course.score, "state": course.state, "without": course.without}
    return {f"{KIND}:{layer}.{key}": value for layer in layers for key, value in values.items()}


def of_numbers(given: Mapping[str, Number], spec: EvaluationSpec, layers: Collection[int]) -> Course:
    """Undo `numbers`. Raises ValueError if the layers' courses differ or are invalid."""
    keys = ("of", "score", "state", "without")
    courses = {tuple(given.get(f"{KIND}:{layer}.{key}") for key in keys) for layer in layers}
    if len(courses) != 1:
        raise ValueError("the layers' states have different courses of evaluations")
    ((of, score, state, without),) = courses
    if of != _of(spec):
        return Course()
    if type(without) is not int or not 0 <= without < MOST_STEPS:
        raise ValueError(f"the evaluations without a better one must be a number of them, got {without!r}")
    if state is None and score is None:
        return Course(without=without)
    if type(state) is not int or not 0 <= state < MOST_STEPS or type(score) is not float or not math.isfinite(score):
        raise ValueError(f"the best evaluation must be a state and its score, got {state!r} and {score!r}")
    return Course(state, score, without)


def _of(spec: EvaluationSpec) -> int:
    """Return a number that identifies the goal and metric of the scores."""
    return zlib.crc32(f"{spec.goal} {spec.metric}".encode())
