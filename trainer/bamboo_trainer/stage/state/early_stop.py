"""How far a training is from its early stop, as a part of the state: so the step at which it ends follows from the job.

Each layer has it, so that any split finds it. It says nothing of the model, and is no part of the state's digest; a
state that was kept without it, or with another metric, begins to count anew.
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
    """Is a number of that name one of these?"""
    return name.startswith(f"{KIND}:")


def numbers(course: Course, spec: EvaluationSpec, layers: Collection[int]) -> dict[str, Number]:
    """By name, for the state of each of these layers."""
    values = {"of": _of(spec), "score": course.score, "state": course.state, "without": course.without}
    return {f"{KIND}:{layer}.{key}": value for layer in layers for key, value in values.items()}


def of_numbers(given: Mapping[str, Number], spec: EvaluationSpec, layers: Collection[int]) -> Course:
    """Raises ValueError if they are not those of one course for all these layers."""
    keys = ("of", "score", "state", "without")
    found = {tuple(given.get(f"{KIND}:{layer}.{key}") for key in keys) for layer in layers}
    if len(found) != 1:
        raise ValueError("the layers' states have different courses of evaluations")
    ((of, score, state, without),) = found
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
    """What the scores are of."""
    return zlib.crc32(f"{spec.goal} {spec.metric}".encode())
