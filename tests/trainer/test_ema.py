"""Averages of weights: as in plain PyTorch, the same bits on any grid and through takeovers, and in exports."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.export import ExportForm, export
from bamboo_trainer.checkpoint.sources import Checkpoint
from bamboo_trainer.task import Task
from export_kit import averages, quiet, write
from manifest_kit import bamboojob, problems, training
from stage_kit import CONFIG, chain, one_step, small_task, state_of

AVERAGED = replace(CONFIG, ema=0.9)


def build(config: Mapping[str, Any]) -> Task:
    optimizer = partial(torch.optim.AdamW, lr=0.05)
    return small_task(optimizer=lambda named: optimizer([p for _, p in named]), learning_rate=lambda step: 0.05)


def document(stages: int, pipelines: int, decay: float = 0.9) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "test_ema:build"},
        training=training(4, 8, 2, emaDecay=decay),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "LazyForward"},
    )


@pytest.mark.parametrize("decay", [0, 1, 1.5, "x"])
def test_a_decay_that_is_none_is_told(decay: Any) -> None:
    wrong = document(1, 1)
    wrong["spec"]["training"]["emaDecay"] = decay
    (problem,) = problems(wrong)
    assert problem.startswith("spec.training.emaDecay: ")


def test_averages_are_exported_instead_of_parameters(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    stages = chain(small_task(tied=(("0.bias", "3.bias"),), layers=TIED), [(0, 2), (2, 4)], AVERAGED)
    for step in range(2):
        one_step(stages, step, AVERAGED)
    manifest = write(store, stages, 2)
    export(
        Checkpoint(store, manifest, averaged=True),
        ExportForm.SAFETENSORS,
        tmp_path / "ema",
        force=False,
        progress=quiet,
    )
    exported, kept = load_file(tmp_path / "ema"), averages(stages)
    assert kept.keys() == {"0.weight", "0.bias", "3.weight"}
    for name, tensor in exported.items():
        short = name.removeprefix("layers.").replace("3.bias", "0.bias")
        expected = kept.get(short, state_of(stages)[name])
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    assert not torch.equal(exported["layers.0.weight"], state_of(stages)["layers.0.weight"])
    assert exported["layers.1.weight"].eq(0.25).all(), "what is frozen is as it is"
    plain = write(CheckpointStore(str(tmp_path / "other")), chain(small_task(), [(0, 3)]), 0)
    source = Checkpoint(CheckpointStore(str(tmp_path / "other")), plain, averaged=True)
    with pytest.raises(ExportError, match="has no averages of weights"):
        export(source, ExportForm.SAFETENSORS, tmp_path / "no", force=False, progress=quiet)


def frozen() -> nn.Linear:
    layer = nn.Linear(2, 2, bias=False).requires_grad_(False)
    nn.init.constant_(layer.weight, 0.25)
    return layer


TIED = (lambda: nn.Linear(2, 2), frozen, nn.Tanh, lambda: nn.Linear(2, 2))
