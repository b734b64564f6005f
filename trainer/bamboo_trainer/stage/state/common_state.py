"""The state that belongs to no layer, from one version to the next: a pure function of the commits."""

import math
from collections.abc import Mapping

import msgspec

from bamboo_core.control.evaluations import Course, EarlyStop
from bamboo_trainer import loss_scale
from bamboo_trainer.frames.payloads import Commit, CommonState
from bamboo_trainer.loss_scale import LossScale
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.deciding import committed_step, first_decided, next_decided
from bamboo_trainer.training import TrainingConfig


def fitted(state: CommonState, task: Task, config: TrainingConfig, version: int) -> CommonState:
    """Return a state at this version with what the job has settings for; an empty state gives the first one.

    Missing parts begin from their first values, as does the course if the job's evaluations differ.
    """
    metric = f"{config.early.goal} {config.early.metric}" if config.early else ""
    return CommonState(
        loss_scale=(state.loss_scale or LossScale(loss_scale.INITIAL)) if config.scales_losses else None,
        decided=(state.decided or first_decided(task, version)) if task.decisions else None,
        course=state.course if state.metric == metric else Course(),
        metric=metric,
    )


def after(state: CommonState, task: Task, config: TrainingConfig, version: int, commit: Commit) -> CommonState:
    """Return the state after the step that begins at this version. commit: of that step."""
    finite = not commit.skipped or math.isfinite(commit.norm)
    return msgspec.structs.replace(
        state,
        loss_scale=state.loss_scale.after(finite=finite) if state.loss_scale else None,
        decided=next_decided(task, state.decided, committed_step(version + 1, commit)),
        course=_course_with(state, config, version, commit.evaluation),
    )


def ending(
    state: CommonState, config: TrainingConfig, version: int, evaluation: Mapping[str, float]
) -> EarlyStop | None:
    """Return the early stop if a decision or this version's evaluation makes the version the last one."""
    course = _course_with(state, config, version, evaluation)
    if config.early and course.is_over(config.early):
        return EarlyStop(best=course.state, without=course.without)
    return EarlyStop(by=state.decided.stops[0]) if state.decided and state.decided.stops else None


def _course_with(state: CommonState, config: TrainingConfig, version: int, evaluation: Mapping[str, float]) -> Course:
    if config.early is None or not evaluation:
        return state.course
    return state.course.after(config.early, version, evaluation)
