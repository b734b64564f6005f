"""Weights in every form in which they may be, and what is said where there are none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.job.spec import InitialSpec
from bamboo_trainer.initial.first_task import begin_with
from bamboo_trainer.initial.opening import open_weights
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from export_kit import write
from stage_kit import chain, small_task

ONE, TWO = {"layers.0.module.a": torch.ones(2)}, {"layers.1.module.b": torch.ones(3)}


def names(url: object, *, of_module: bool = True, **fields: Any) -> list[str]:
    opened = open_weights(InitialSpec(url=str(url), **fields))
    return [offer.name for offer in opened.offered(of_module=of_module)]


def test_the_weights_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    save_file({**ONE, **TWO}, tmp_path / "weights" / "model.safetensors")
    assert names(tmp_path / "weights") == ["a", "b"]
    assert names(f"file://{tmp_path}/weights", of_module=False) == [*ONE, *TWO]
    with pytest.raises(TaskError, match=r"expected a folder of weights, such as .*weights, got"):
        names(tmp_path)
    with pytest.raises(TaskError, match=r"task.initialFrom.step: expected only with checkpoints, and .* has weights"):
        names(tmp_path / "weights", step=3)


def test_a_published_folder_and_its_file(tmp_path: Path) -> None:
    for number, tensors in enumerate((ONE, TWO)):
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{n}.safetensors" for n, one in enumerate((ONE, TWO)) for name in one}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names(tmp_path) == ["a", "b"]
    assert names(tmp_path / "model-1.safetensors") == ["b"]
    (tmp_path / "model-1.safetensors").write_bytes(b"no weights")
    with pytest.raises(TaskError, match=r"task.initialFrom: cannot read .*model-1.safetensors"):
        names(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(TaskError, match=r"model.safetensors.index.json names model-1.safetensors, which is not there"):
        names(tmp_path)


def test_a_checkpoint_of_a_step(tmp_path: Path) -> None:
    stages = chain(small_task(), [(0, 2), (2, 3)])
    write(CheckpointStore(str(tmp_path)), stages, 0)
    assert names(tmp_path, step=0) == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    with pytest.raises(TaskError, match=r"step: expected the step of a checkpoint; the newest one in .* is of step 0"):
        names(tmp_path)
    with pytest.raises(TaskError, match=r"has no complete checkpoint of step 4; complete: steps 0"):
        names(tmp_path, step=4)
    task, lines = begin_with(InitialSpec(url=str(tmp_path), step=0), small_task())
    taken, own = (build_layer(task, 9, 2).state_dict(), stages[1].values.layers[2].state_dict())
    assert all(torch.equal(taken[name], tensor) for name, tensor in own.items())
    assert lines == [f"taken from the checkpoint of step 0 in {tmp_path}: 4 tensors"]


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.initialFrom.url: there is no .*absent"):
        names(tmp_path / "absent")
    with pytest.raises(TaskError, match=r"task.initialFrom: .* has no complete checkpoint"):
        names(tmp_path)
    with pytest.raises(TaskError, match=r"task.initialFrom.url ftp://x: nothing is known of ftp://"):
        names("ftp://x")
