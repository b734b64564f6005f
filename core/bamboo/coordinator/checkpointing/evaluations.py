"""What evaluations say of the course of a training: which state is the best, and whether to go on."""

import math
from collections.abc import Mapping

from bamboo.job.spec import EvaluationSpec, Goal

Evaluations = Mapping[int, Mapping[str, float | None]]  # by state: the optimizer steps that it has seen


def score(spec: EvaluationSpec, metrics: Mapping[str, float | None]) -> float | None:
    """The larger the better; None if the metric that decides is not known, or not finite."""
    value = metrics.get(spec.metric)
    if value is None or not math.isfinite(value):
        return None
    return value if spec.goal is Goal.MAX else -value


def best(spec: EvaluationSpec, evaluations: Evaluations) -> int | None:
    """The state with the best score; of those that differ by no more than `min_delta` the first."""
    found: tuple[int, float] | None = None
    for step in sorted(evaluations):
        value = score(spec, evaluations[step])
        if value is not None and (found is None or value > found[1] + spec.min_delta):
            found = step, value
    return found[0] if found else None


def since_best(spec: EvaluationSpec, evaluations: Evaluations) -> int:
    """How many evaluations came after that of the best state; all, if there is none."""
    state = best(spec, evaluations)
    return sum(state is None or step > state for step in evaluations)
