"""The decisions of a task are asked and checked; what is wrong becomes one sentence."""

import math
from typing import Any

import pytest

from bamboo_trainer.decisions import Committed, Decision
from bamboo_trainer.frames.payloads import Commit, Decided
from bamboo_trainer.tasks.deciding import (
    committed_step,
    first_decided,
    frozen_among,
    next_decided,
)
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import small_task


def test_what_several_say_adds_up() -> None:
    task = small_task(
        decisions={
            "slow": lambda done, memory: Decision(learning_rate=0.5, memory={"steps": done.step}),
            "slower": lambda done, memory: Decision(learning_rate=0.25, frozen=("0.*",)),
            "end": lambda done, memory: Decision(frozen=["2.bias", "0.*"], stop=done.step == 1),
        }
    )
    said = first_decided(task, 0)
    assert said is not None
    assert (said.learning_rate, said.frozen, said.stops) == (0.125, ("0.*", "2.bias"), ())
    said = next_decided(task, said, Committed(step=1))
    assert said is not None
    assert (said.stops, said.memory["slow"]) == (("end",), {"steps": 1})
    assert frozen_among(["0.weight", "0.bias", "2.weight", "2.bias"], said) == {"0.weight", "0.bias", "2.bias"}


def test_each_is_given_its_own_memory() -> None:
    seen: list[Any] = []
    task = small_task(decisions={"it": lambda done, memory: seen.append(dict(memory)) or Decision(memory={"n": 1})})
    next_decided(task, Decided(memory={"it": {"n": 7}, "gone": {"n": 8}}), Committed(step=1))
    next_decided(task, Decided(memory={"other": {"n": 7}}), Committed(step=1))
    assert seen == [{"n": 7}, {}]


def test_a_task_without_any_says_nothing() -> None:
    assert first_decided(small_task(), 0) is None
    assert frozen_among(["0.weight"], None) == frozenset()


def test_what_is_not_finite_is_no_number() -> None:
    commit = Commit(norm=math.inf, loss=math.nan, microbatches=1, generation=0, epoch=0, metrics={"m": math.nan})
    done = committed_step(3, commit)
    assert (done.step, done.loss, done.gradient_norm, done.metrics) == (3, None, None, {"m": None})


def broken(done: Committed, memory: Any) -> Decision:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (broken, r"task.decisions\['it'\], after step 2, raised ZeroDivisionError: no \(.*test_deciding.py line \d+"),
        (lambda done, memory: None, "returned NoneType, expected a Decision"),
        (lambda done, memory: Decision(learning_rate=math.nan), "learning_rate=nan, expected a finite number"),
        (lambda done, memory: Decision(learning_rate=-1), "learning_rate=-1, expected a finite number"),
        (lambda done, memory: Decision(frozen="0.*"), r"frozen='0.\*', expected names such as"),
        (lambda done, memory: Decision(memory={"x": math.inf}), r"returned inf as memory\['x'\], expected a finite"),
        (lambda done, memory: Decision(memory={"x": "y"}), r"returned 'y' as memory\['x'\]"),  # type: ignore[dict-item]
        (lambda done, memory: Decision(memory={str(n): n for n in range(65)}), "expected at most 64 numbers by name"),
    ],
)
def test_a_wrong_answer_is_told_by_the_decisions_name(decide: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        next_decided(small_task(decisions={"it": decide}), None, Committed(step=2))
