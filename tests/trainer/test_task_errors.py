"""Errors of a task's code, reported in one line with file, line and function; lack of memory has its own reason."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_trainer.loading import load_task
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks import task_errors
from bamboo_trainer.tasks.task_errors import TaskError, TaskOutOfMemory, describe, is_tasks, where
from bamboo_trainer.tasks.user_code import unchanged_buffers
from bamboo_trainer.worker.agent import failure_message, failure_reason
from stage_kit import CONFIG, one_step, small_task

HERE = Path(__file__)
RAISED: list[Exception] = []  # what the parts below raise


def fall(*_: Any, **__: Any) -> Any:
    raise RAISED[-1]


class Falling(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return fall()


class FallingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return fall()


class Backward(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return FallingBack.apply(given)


class Data:
    def __init__(self, length: Callable[[], int], batch: Callable[[], tuple[Parts, Parts]]) -> None:
        self._length, self._batch = length, batch

    def __len__(self) -> int:
        return self._length()

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        return self._batch()


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return fall()


def data(**changes: Callable[[], Any]) -> Data:
    pair = (torch.ones(2, 2),), (torch.ones(2, 2),)
    return Data(**{"length": lambda: 12, "batch": lambda: pair, **changes})


LAYERS = small_task().layers
PARTS: dict[str, tuple[Task, str]] = {
    "factory": (small_task(layers=(*LAYERS[:2], fall)), "the factory of layer 2"),
    "layer": (small_task(layers=(*LAYERS[:2], Falling)), "layer 2 (Falling)"),
    "loss": (small_task(loss=fall), "the loss"),
    "backward": (
        small_task(layers=(LAYERS[0], Backward, LAYERS[2])),
        "the backward of layer",
    ),
    "samples": (small_task(dataset=data(batch=fall)), "the dataset, asked for samples ["),
    "length": (small_task(dataset=data(length=fall)), "the dataset, asked for its length,"),
    "optimizer": (small_task(optimizer=fall), "task.optimizer"),
    "optimizer's step": (
        small_task(optimizer=lambda named: Optimizer([p for _, p in named], lr=0.1)),
        "the optimizer (Optimizer), in step 1,",
    ),
    "learning rate": (small_task(learning_rate=fall), "task.learning_rate(0)"),
}


def train(task: Task) -> None:
    one_step([build_stage(task, 0, [(0, 3)], CONFIG)], 0)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (ValueError("two\n  lines"), "TaskFailed", " raised ValueError: two lines ("),
        (KeyError("two\nlines"), "TaskFailed", r" raised KeyError: 'two\nlines' ("),
        (MemoryError(), "OutOfMemory", " ran out of memory: MemoryError ("),
    ],
)
def test_what_any_part_of_a_task_raises_is_the_tasks_and_told_in_one_line_with_its_place(
    error: Exception, reason: str, said: str, part: str
) -> None:
    task, named = PARTS[part]
    RAISED.append(error)
    with pytest.raises((TaskError, TaskOutOfMemory)) as caught:
        train(task)
    message = str(caught.value)
    assert message.startswith(named)
    assert said in message
    line = fall.__code__.co_firstlineno + 1
    assert f"({where(caught.value.__cause__)})" in message
    assert f"{HERE.name} line {line}, in fall)" in message
    assert "\n" not in message
    assert (failure_reason(caught.value), failure_message(caught.value)) == (reason, message)


def test_the_innermost_frame_of_the_users_code_is_named_and_not_torchs() -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(RuntimeError) as caught:
        layer(torch.ones(2, 3))
    name = "test_the_innermost_frame_of_the_users_code_is_named_and_not_torchs"
    assert where(caught.value).endswith(f"{HERE.name} line {caught.traceback[0].lineno + 1}, in {name}")
    assert describe(caught.value).startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 8x8) (")
    assert where(ValueError("never raised")) == ""


def test_whose_an_error_is_depends_on_whose_code_was_the_last_to_act() -> None:
    """An error in a task's hook is the task's error, although the engine's code calls the hook."""
    with pytest.raises(AssertionError) as bug:
        build_stage(small_task(), 0, [(0, 3)], CONFIG).backward(None, 0, 0, (torch.ones(1),))  # type: ignore[arg-type]
    assert not is_tasks(bug.value)
    assert failure_reason(bug.value) == "WorkerError"
    RAISED.append(IndexError("in a hook"))
    with pytest.raises(IndexError) as hook, in_engine():
        fall()
    assert is_tasks(hook.value)
    assert failure_reason(hook.value) == "TaskFailed"


def in_engine() -> AbstractContextManager[object]:
    """Return a context that adds frames of Bamboo's own code to an error's traceback."""
    return unchanged_buffers({})


def test_a_lazy_module_is_refused_by_the_name_of_its_parameter() -> None:
    task = small_task(layers=(LAYERS[0], nn.Tanh, lambda: nn.LazyLinear(2)))
    with pytest.raises(TaskError, match=r"2\.weight has no shape yet: a lazy module"):
        train(task)


class BuiltLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module | None = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.inner is None:
            self.inner = nn.Linear(given.shape[-1], 2)
        return self.inner(given)  # type: ignore[no-any-return]


def test_parameters_that_a_forward_makes_are_refused() -> None:
    """A layer that makes parameters in a forward or a rehearsal is refused, as no optimizer would train them."""
    task = small_task(layers=(*LAYERS[:2], BuiltLate))
    message = r"layer 2 \(BuiltLate\) makes its parameter 'inner.weight' in the forward, after the layers were split"
    with pytest.raises(TaskError, match=message):
        train(task)
    with pytest.raises(TaskError, match=message):
        build_stage(task, 0, [(0, 3)], CONFIG).rehearse(0, 0, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 / 0\n", r"cannot import 'wrong': ZeroDivisionError: division by zero \(.*wrong\.py line 1, in <module>\)$"),
        (
            "def build(config):\n    raise ValueError('no\\nsuch')\n",
            r"task\.config: no such \(.*wrong\.py line 2, in build\)$",
        ),
        (
            "def build(config):\n    return config['a']\n",
            r"wrong:build raised KeyError: 'a' \(.*wrong\.py line 2, in build\)$",
        ),
        (
            "import sys\ndef build(config):\n    sys.exit('gone')\n",
            r"wrong:build raised SystemExit: gone \(.*wrong\.py line 3, in build\)$",
        ),
    ],
)
def test_a_task_that_cannot_be_made_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    (tmp_path / "wrong.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    with pytest.raises(TaskError, match=told):
        load_task("wrong:build", {})


def test_paths_are_as_short_as_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert task_errors.shown(str(tmp_path / "a" / "b.py")) == "a/b.py"
    assert task_errors.shown("/elsewhere/b.py") == "/elsewhere/b.py"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert task_errors.shown("/elsewhere/b.py") == "/elsewhere/b.py"


def test_an_error_that_cannot_say_what_it_is_is_told_all_the_same() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            return self.detail  # type: ignore[attr-defined, no-any-return]

    RAISED.append(Mute())
    with pytest.raises(
        TaskError, match=r"^layer 2 \(Falling\) raised Mute: str\(\) of it raises AttributeError \(.*in fall"
    ):
        train(small_task(layers=(*LAYERS[:2], Falling)))
