"""Calls and checks a task's decisions, and finds which of a stage's parameters they freeze."""

import math
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from bamboo_trainer.decisions import Committed, Decision, Memory
from bamboo_trainer.frames.payloads import MOST_DECISIONS, MOST_MEMORY, Commit, Decided
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError, in_task

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_LARGEST: Final = 2**53  # of whole numbers


def check_decisions(task: Task) -> None:
    """Raise TaskError if the task's decisions are not functions by name, or too many."""
    given = task.decisions
    if not isinstance(given, Mapping) or not all(callable(decide) for decide in given.values()):
        raise TaskError(f"Task.decisions: expected functions by name, got {type(given).__name__}")
    if len(given) > MOST_DECISIONS:
        raise TaskError(f"Task.decisions: {len(given)} decisions, at most {MOST_DECISIONS} are accepted")
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TaskError(f"Task.decisions: a name is {name!r}, expected letters, digits, _ and - (at most 40)")


def first_decided(task: Task, step: int) -> Decided | None:
    """Return the decisions for a state without earlier decisions; None if the task has none."""
    return _decided(task, Committed(step=step), {})


def next_decided(task: Task, before: Decided | None, done: Committed) -> Decided | None:
    """Return the decisions after that step; None if the task has none. before: those after the step before."""
    return _decided(task, done, before.memory if before else {})


def committed_step(step: int, commit: Commit) -> Committed:
    """Return the facts of a commit for decisions. step: the number of steps committed with it."""
    return Committed(
        step=step,
        loss=_finite(commit.loss),
        gradient_norm=_finite(commit.norm),
        metrics={name: _finite(value) for name, value in commit.metrics.items()},
        evaluation={name: _finite(value) for name, value in commit.evaluation.items()},
        skipped=commit.skipped,
    )


def frozen_among(names: Collection[str], decided: Decided | None) -> frozenset[str]:
    """Return which of these parameters stay unchanged in the next step."""
    return _matching(tuple(names), tuple(decided.frozen)) if decided else frozenset()


@lru_cache(maxsize=256)
def _matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _decided(task: Task, done: Committed, memories: Mapping[str, Memory]) -> Decided | None:
    if not task.decisions:
        return None
    decisions = {name: _asked(task, name, done, memories.get(name, {})) for name in sorted(task.decisions)}
    return Decided(
        learning_rate=math.prod((decision.learning_rate for decision in decisions.values()), start=1.0),
        frozen=tuple(sorted({pattern for decision in decisions.values() for pattern in decision.frozen})),
        stops=tuple(name for name, decision in decisions.items() if decision.stop),
        memory={name: dict(decision.memory) for name, decision in decisions.items()},
    )


def _asked(task: Task, name: str, done: Committed, memory: Memory) -> Decision:
    """Call a decision. Raises TaskError for an invalid result."""
    who = f"task.decisions[{name!r}], after step {done.step},"
    with in_task(who):
        decision = task.decisions[name](done, memory)
    if not isinstance(decision, Decision):
        raise TaskError(f"{who} returned {type(decision).__name__}, expected a Decision")
    rate = decision.learning_rate
    if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
        raise TaskError(f"{who} returned learning_rate={rate!r}, expected a finite number that is not negative")
    if isinstance(decision.frozen, str) or not all(isinstance(one, str) for one in decision.frozen):
        raise TaskError(f'{who} returned frozen={decision.frozen!r}, expected names such as "0.weight" in a tuple')
    if not isinstance(decision.memory, Mapping) or len(decision.memory) > MOST_MEMORY:
        raise TaskError(f"{who} returned memory={decision.memory!r}, expected at most {MOST_MEMORY} numbers by name")
    for key, value in decision.memory.items():
        number = value is None or (isinstance(value, int) and abs(value) <= _LARGEST)
        if not isinstance(key, str) or not (number or (isinstance(value, float) and math.isfinite(value))):
            raise TaskError(f"{who} returned {value!r} as memory[{key!r}], expected a finite number or None")
    return decision


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
