"""Evaluations of a training run: the best state so far, and early stopping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from bamboo_core.job.training_spec import EvaluationSpec, Goal
from bamboo_core.text import count

Metrics = Mapping[str, float | None]
Evaluations = Mapping[int, Metrics]  # by the number of optimizer steps of the evaluated state


Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class EarlyStop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The early end of a job, caused by its evaluations or a decision of the task. The state at which this is decided
    becomes the job's last one.
    """

    best: Count | None = None  # optimizer steps of the best state; None if no evaluation has a score
    without: Count = 0  # evaluations since the best state
    by: Annotated[str, msgspec.Meta(max_length=40)] = ""  # the task's decision; "" if evaluations ended the job

    def why(self, metric: str) -> str:
        """Return why training ended early, as a clause. metric: name of the metric that decides which state is best."""
        if self.by:
            return f"the task's decision {self.by!r} ended training"
        best = "none has one" if self.best is None else f"the best state is that after step {self.best}"
        return f"{count(self.without, 'evaluation')} without a better {metric}; {best}"


@dataclass(frozen=True, slots=True)
class Course:
    """The best evaluation so far, and the number of evaluations since then."""

    # state, score: the best state and its score, the first of equal ones; None if no evaluation has a score
    state: int | None = None
    score: float | None = None
    without: int = 0  # evaluations after it; all of them if there is no best state

    def after(self, spec: EvaluationSpec, state: int, metrics: Metrics) -> "Course":
        """Return the course with one more evaluation, of a later state."""
        value = score(spec, metrics)
        if value is not None and (self.score is None or value > self.score):
            return Course(state, value)
        return Course(self.state, self.score, self.without + 1)

    def is_over(self, spec: EvaluationSpec) -> bool:
        """Return whether early stopping is due: `patience` evaluations without a better score."""
        return spec.patience is not None and self.without >= spec.patience


def score(spec: EvaluationSpec, metrics: Metrics) -> float | None:
    """Return the score: the spec's metric, negated for goal Min, so larger is better; None if missing or not finite."""
    value = metrics.get(spec.metric)
    if value is None or not math.isfinite(value):
        return None
    return value if spec.goal is Goal.MAX else -value


def course(spec: EvaluationSpec, evaluations: Evaluations) -> Course:
    """Return the course of these evaluations, taken in the order of their steps."""
    result = Course()
    for state in sorted(evaluations):
        result = result.after(spec, state, evaluations[state])
    return result


def best(spec: EvaluationSpec, evaluations: Evaluations) -> int | None:
    """Return the optimizer steps of the state with the best score; None if no evaluation has a score."""
    return course(spec, evaluations).state
