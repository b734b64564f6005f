"""Reading of published weights, layer by layer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_trainer.loading import load_task
from bamboo_trainer.models import huggingface, huggingface_files
from bamboo_trainer.models.huggingface_files import opened
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from transformers_kit import ENTRYPOINT, FAMILIES, LENGTH, layers_of, state_of, transformers

pytest_plugins = ["transformers_kit"]


def test_a_folder_is_read_layer_by_layer(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Noting:
        def __init__(self, file: Any) -> None:
            self.keys, self._file = file.keys, file

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self._file.get_tensor(name)

    @contextmanager
    def noting(path: Path) -> Iterator[Noting]:
        with opened(path) as file:
            yield Noting(file)

    monkeypatch.setattr(huggingface_files, "opened", noting)
    task = huggingface.build({"model": str(published), "data": {"length": LENGTH}})
    assert read == []
    layer = build_layer(task, 0, 2)
    assert len(read) == 12
    assert all(".h.1." in name for name in read)
    expected = transformers.GPT2LMHeadModel.from_pretrained(published, dtype=torch.float32).state_dict()
    assert all(torch.equal(t, expected[k.removeprefix("module.")]) for k, t in layer.state_dict().items())
    state = state_of(layers_of(task))
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_a_base_model_without_a_head_prefix_is_read(tmp_path: Path) -> None:
    made = transformers.GPT2Model(transformers.GPT2Config(**FAMILIES["gpt2"]))
    made.save_pretrained(tmp_path)
    task = huggingface.build({"model": str(tmp_path), "data": {"length": LENGTH}})
    state = state_of(layers_of(task))
    assert torch.equal(state["transformer.h.2.mlp.c_fc.weight"], made.h[2].mlp.c_fc.weight)


def test_a_folder_that_is_not_whole_is_refused(published: Path, tmp_path: Path) -> None:
    for path in published.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = content["weight_map"].pop("transformer.h.1.ln_1.weight")
    index.write_text(json.dumps(content))
    config = {"model": str(tmp_path), "data": {"length": LENGTH}}
    with pytest.raises(TaskError, match=r"has no tensor transformer.h.1.ln_1.weight; to begin with random values say"):
        load_task(ENTRYPOINT, config)
    (tmp_path / lost).unlink()
    with pytest.raises(TaskError, match=f"names {lost}, which is not there"):
        load_task(ENTRYPOINT, config)
    index.unlink()
    with pytest.raises(TaskError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_task(ENTRYPOINT, config)
    assert load_task(ENTRYPOINT, {**config, "random": True}).layers
