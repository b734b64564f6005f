"""Evaluations of a training: which state is the best, and whether to stop early."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from bamboo_core.job.training_spec import EvaluationSpec, Goal
from bamboo_core.text import count

Metrics = Mapping[str, float | None]
Evaluations = Mapping[int, Metrics]  # by state: its number of optimizer steps


Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class EarlyStop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The early end of a job, by its evaluations or by a decision of the task. The state then is the last one."""

    best: Count | None = None  # the best state, if any
    without: Count = 0  # evaluations since the best state
    by: Annotated[str, msgspec.Meta(max_length=40)] = ""  # the task's decision, if that ended the job

    def why(self, metric: str) -> str:
        """Return a sentence on why training ended early. metric: the name of the deciding one."""
        if self.by:
            return f"the task's decision {self.by!r} ended training"
        best = "none has one" if self.best is None else f"the best state is that after step {self.best}"
        return f"{count(self.without, 'evaluation')} without a better {metric}; {best}"


@dataclass(frozen=True, slots=True)
class Course:
    """The result of all evaluations so far."""

    # state, score: the best state and its score; the first of equal ones
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
        """Return whether the job is to end because nothing has improved for too long."""
        return spec.patience is not None and self.without >= spec.patience


def score(spec: EvaluationSpec, metrics: Metrics) -> float | None:
    """Return the score, the larger the better; None if the deciding metric is unknown or not finite."""
    value = metrics.get(spec.metric)
    if value is None or not math.isfinite(value):
        return None
    return value if spec.goal is Goal.MAX else -value


def course(spec: EvaluationSpec, evaluations: Evaluations) -> Course:
    """Return the course of all these evaluations."""
    result = Course()
    for state in sorted(evaluations):
        result = result.after(spec, state, evaluations[state])
    return result


def best(spec: EvaluationSpec, evaluations: Evaluations) -> int | None:
    """Return the state with the best score."""
    return course(spec, evaluations).state
