"""What evaluations say of the course of a training: which state is the best, and whether to go on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from bamboo_core.job.training_spec import EvaluationSpec, Goal
from bamboo_core.text import count

Metrics = Mapping[str, float | None]
Evaluations = Mapping[int, Metrics]  # by state: the optimizer steps that it has seen


Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class EarlyStop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job ends with the state that was evaluated, or that a decision of the task has made the last one."""

    best: Count | None = None  # the best one, if there is any
    without: Count = 0  # evaluations since
    by: Annotated[str, msgspec.Meta(max_length=40)] = ""  # the decision

    def why(self, metric: str) -> str:
        """A sentence on why training ended early. metric: the name of the one that decides."""
        if self.by:
            return f"the task's decision {self.by!r} ended training"
        best = "none has one" if self.best is None else f"the best state is that after step {self.best}"
        return f"{count(self.without, 'evaluation')} without a better {metric}; {best}"


@dataclass(frozen=True, slots=True)
class Course:
    """What the evaluations so far came to."""

    # state, score: the best state and its score; of equal ones the first
    state: int | None = None
    score: float | None = None
    without: int = 0  # how many evaluations came after it; all of them if there is no best one

    def after(self, spec: EvaluationSpec, state: int, metrics: Metrics) -> "Course":
        """The course with one evaluation more, of a later state."""
        value = score(spec, metrics)
        if value is not None and (self.score is None or value > self.score):
            return Course(state, value)
        return Course(self.state, self.score, self.without + 1)

    def is_over(self, spec: EvaluationSpec) -> bool:
        """Is the job to end, as nothing has become better for too long?"""
        return spec.patience is not None and self.without >= spec.patience


def score(spec: EvaluationSpec, metrics: Metrics) -> float | None:
    """The larger the better; None if the metric that decides is not known, or not finite."""
    value = metrics.get(spec.metric)
    if value is None or not math.isfinite(value):
        return None
    return value if spec.goal is Goal.MAX else -value


def course(spec: EvaluationSpec, evaluations: Evaluations) -> Course:
    """The course of all these evaluations."""
    found = Course()
    for state in sorted(evaluations):
        found = found.after(spec, state, evaluations[state])
    return found


def best(spec: EvaluationSpec, evaluations: Evaluations) -> int | None:
    """The state with the best score."""
    return course(spec, evaluations).state
