"""What the trainer does for a command."""

import pytest

from bamboo.local.trainer_calls import task_check, trainer_process
from bamboo.local.trainer_calls.task_check import check_task
from task_check_kit import SPIRALS


def test_without_the_trainer_it_is_said_that_nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "find_spec", lambda name: None if name == "torch" else object())
    assert check_task(SPIRALS, ()) == task_check.Checked(
        lines=("not checked: the task, since torch is not installed here",)
    )
