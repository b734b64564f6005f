"""Averages of weights: as in plain PyTorch, the same bits on any grid and through takeovers, and in exports."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_export import quiet, write
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bamboo.checkpoint.store import CheckpointStore
from bamboo.control.digests import add_digests
from bamboo.planning.plan import Cell
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.export import ExportForm, export
from bamboo_trainer.checkpoint.sources import Checkpoint
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.optimizer_state import AVERAGE
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.user_code import build_layer
from manifest_kit import bamboojob, problems, training
from stage_kit import CONFIG, accumulate, chain, one_step, small_task, state_of
from training_job import Fault, Job

AVERAGED = replace(CONFIG, ema=0.9)


OPTIMIZERS = {
    "AdamW": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
    "Adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.05),  # its state comes with a step
}


def task_with(optimizer: str) -> Task:
    return small_task(optimizer=OPTIMIZERS[optimizer], learning_rate=lambda step: 0.05)


def averages(stages: list[Stage]) -> dict[str, Tensor]:
    found = {}
    for stage in stages:
        tensors, meta = stage.snapshot()
        found |= dict(zip(meta["names"], tensors, strict=True))
    names = {name: name.removeprefix("state:").removesuffix(f":{AVERAGE}") for name in found if AVERAGE in name}
    return {short: found[name] for name, short in names.items()}


def plainly(task: Task, steps: int) -> dict[str, Tensor]:
    """With torch's own averaging."""
    model = nn.Sequential(*(build_layer(task, AVERAGED.seed, index) for index in range(3)))
    optimizer = task.optimizer(list(model.named_parameters()))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # the first call copies
    for step in range(steps):
        optimizer.zero_grad()
        accumulate(task, model, AVERAGED, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), AVERAGED.max_gradient_norm or 0.0)
        optimizer.step()
        averaged.update_parameters(model)
    return {name: tensor.detach() for name, tensor in averaged.module.named_parameters()}


@pytest.mark.parametrize("split", [[(0, 3)], [(0, 1), (1, 3)]], ids=len)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averages_are_torchs(optimizer: str, split: list[tuple[int, int]]) -> None:
    stages = chain(task_with(optimizer), split, AVERAGED)
    without = chain(task_with(optimizer), split, CONFIG)
    for step in range(4):
        assert one_step(stages, step, AVERAGED) == one_step(without, step, CONFIG), "training does not depend on it"
    torch.testing.assert_close(averages(stages), plainly(task_with(optimizer), 4), rtol=1e-5, atol=1e-7)
    held, remembered = stages[0].state_bytes()
    assert remembered - without[0].state_bytes()[1] == sum(p.nbytes for p in stages[0]._parameters.trained()), (
        "it is accounted for"
    )
    assert held == without[0].state_bytes()[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replica_and_another_split_go_on_with_the_same_averages(optimizer: str) -> None:
    (stage,) = chain(task_with(optimizer), [(0, 3)], AVERAGED)
    for step in range(2):
        one_step([stage], step, AVERAGED)
    (replica,), parts = (chain(task_with(optimizer), split, AVERAGED) for split in ([(0, 3)], [(0, 1), (1, 3)]))
    replica.park(True)
    replica.restore(*stage.snapshot())
    for part in parts:
        part.restore_layers(stage.layer_states())
    for one in (stage, replica, *parts):
        one.skip(finite=True)  # a skipped step moves nothing
    for step in range(3, 5):
        one_step([stage], step, AVERAGED)
        one_step([replica], step, AVERAGED)
        one_step(parts, step, AVERAGED)
    assert stage.digest() == replica.digest() == add_digests(part.digest() for part in parts)
    (without,) = chain(task_with(optimizer), [(0, 3)], CONFIG)
    with pytest.raises(ValueError, match=AVERAGE):
        without.restore(*stage.snapshot())


def build(config: Mapping[str, Any]) -> Task:
    return task_with("AdamW")


def document(stages: int, pipelines: int, decay: float = 0.9) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "test_ema:build"},
        training=training(4, 8, 2, ema={"decay": decay}),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "LazyForward"},
    )


def test_no_grid_and_no_loss_of_a_worker_changes_the_averages() -> None:
    """Digests cover them."""
    alone = Job(document(1, 1)).run()
    for other in (
        Job(document(3, 1), (Fault("Backward", Cell(0, 1), 2),)).run(),
        Job(document(2, 2), (Fault("OptimizerStep", Cell(1, 1), 2),)).run(),
    ):
        assert other.state.takeovers
        assert add_digests(other.digests) == add_digests(alone.digests)
    assert add_digests(Job(document(1, 1, decay=0.5)).run().digests) != add_digests(alone.digests)


@pytest.mark.parametrize("decay", [0, 1, 1.5, "x", None])
def test_a_decay_that_is_none_is_told(decay: Any) -> None:
    wrong = document(1, 1)
    wrong["spec"]["training"]["ema"]["decay"] = decay
    (problem,) = problems(wrong)
    assert problem.startswith("spec.training.ema.decay: ")


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
