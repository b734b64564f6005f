"""A plain module is split into layers that compute what it computes, and is refused with a reason if it cannot be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plain_models
from bamboo_trainer.from_module import from_module
from bamboo_trainer.task import Evaluation, Parts
from bamboo_trainer.tasks.evaluation import measured
from bamboo_trainer.tasks.running_buffers import running_norms
from bamboo_trainer.tasks.user_code import task_metrics
from from_module_kit import check_gradients, layers_of, run, small, whole

MODELS = ("chain", "dictionaries", "sizes", "encoded", "normed")


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_compute_what_the_model_computes(name: str) -> None:
    """The loss and every gradient, for a number of samples that the model has not been looked at with."""
    given = plain_models.parts(name)
    task = plain_models.build({"model": name})
    layers, model = whole(task, given["make"])
    for module in (*layers, model):
        module.eval()
    inputs, targets = task.dataset.batch([3, 4, 5, 9, 11])
    loss = task.loss(run(layers, inputs), targets)
    output = model(**dict(zip(given["inputs"], inputs, strict=True))) if "inputs" in given else model(*inputs)
    expected = given["loss"]((output,) if isinstance(output, Tensor) else output, targets)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    check_gradients(layers, model)


class Normed(nn.Module):
    """frozen: its BatchNorm, which is in the model's own code."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.norm.train(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def running(make: Callable[[], nn.Module]) -> list[Any]:
    return [found for layer in layers_of(from_module(make, **small())) for found in running_norms(layer)]


def test_a_frozen_norm_before_the_blocks_stays_as_it_is() -> None:
    """Its count is no part of the layer that computes it, as that does not use it."""
    assert [found.contributes for found in running(lambda: Normed(frozen=True))] == [False]
    assert [found.names for found in running(lambda: Normed(frozen=True))] == [("running_mean", "running_var")]
    assert [found.contributes for found in running(lambda: Normed(frozen=False))] == [True]


def test_a_model_that_is_made_in_eval_mode_is_trained_as_a_plain_loop_would() -> None:
    assert [found.contributes for found in running(lambda: Normed(frozen=True).eval())] == [True]
    layers = layers_of(from_module(lambda: Normed(frozen=False).eval(), **small()))
    assert all(m.training for layer in layers for m in layer.modules() if isinstance(m, nn.Dropout))


def test_further_tensors_that_a_module_keeps_come_with_their_values() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = {"ones": [torch.ones(4), 3]}
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.blocks[0].scale = torch.full((4,), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.blocks[0](x + self.tables["ones"][0])
            return out * 2

    task = from_module(Kept, **small())
    layers, model = whole(task, Kept)
    x = torch.rand(3, 4)
    assert torch.equal(run(layers, (x,))[0], model(x))
    assert torch.equal(layers[1].module.get_submodule("blocks.0").scale, torch.full((4,), 2.0))


def test_the_loss_gets_what_that_of_a_task_gets() -> None:
    """Tuples of tensors, of which the first has all samples, although the model returns one tensor."""
    task = from_module(plain_models.chain, **small_chain() | {"loss": lambda outputs, targets: outputs[0].mean()})
    inputs, targets = task.dataset.batch([0, 1, 2])
    outputs = run(layers_of(task), inputs)
    assert torch.equal(task.loss(outputs, targets), outputs[0].mean())


def test_metrics_get_what_the_loss_gets() -> None:
    """What the model returned, a dictionary here, and the targets; in a step and in an evaluation."""

    def metric(outputs: dict[str, Tensor], targets: Parts) -> Tensor:
        return (outputs["logits"].argmax(-1) == targets[0]).float().mean()

    given = plain_models.parts("dictionaries")
    fields = {"optimizer": plain_models.optimizer, "learning_rate": 0.1}
    evaluation = Evaluation(dataset=given["dataset"], metrics={"right": metric})
    task = from_module(given.pop("make"), **given, **fields, metrics={"right": metric}, evaluation=evaluation)
    inputs, targets = task.dataset.batch([0, 1])
    outputs = run(layers_of(task), inputs)
    assert task.evaluation is not None
    found, samples = measured(task, task.evaluation, outputs, targets, 2)["right"]
    assert samples == 2
    assert task_metrics(task, outputs, targets) == {"right": (found / 2, 1.0)}


def small_chain() -> dict[str, Any]:
    given = plain_models.parts("chain")
    del given["make"]
    return {**given, "optimizer": plain_models.optimizer, "learning_rate": 0.1}
