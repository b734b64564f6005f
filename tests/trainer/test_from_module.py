"""The split of a plain module into layers with equal results, and modules that are refused with a reason."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plain_models
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.task import Evaluation, Parts
from bamboo_trainer.tasks.evaluation import measured
from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.running_buffers import running_norms
from bamboo_trainer.tasks.user_code import build_layer, task_metrics
from from_module_kit import check_gradients, layers_of, model_of, run, small, squared_error, whole
from stage_kit import chain, one_step, state_of


def test_a_layer_has_the_same_values_whoever_makes_it_and_another_one_has_others() -> None:
    one, other = (plain_models.build({"model": "dictionaries"}) for _ in range(2))
    third = build_layer(one, 5, 3).state_dict()
    assert all(torch.equal(t, third[k]) for k, t in build_layer(other, 5, 3).state_dict().items())
    fourth = build_layer(other, 5, 4).state_dict()
    weight = "module.blocks.{}.linear.weight"
    assert not torch.equal(third[weight.format(2)], fourth[weight.format(3)])


def test_parameters_that_the_module_freezes_stay_as_they_are() -> None:
    def frozen() -> nn.Module:
        model = plain_models.chain().requires_grad_(False)
        model[-1].requires_grad_(True)
        return model

    given = {**plain_models.parts("chain"), "make": frozen}
    task = from_module(**given, optimizer=plain_models.optimizer, learning_rate=1e-2)
    stages = chain(task, [(0, 2), (2, len(task.layers))])
    before = state_of(stages)
    one_step(stages, 0)
    changed = {name for name, tensor in state_of(stages).items() if not torch.equal(tensor, before[name])}
    last = f"layers.{len(task.layers) - 1}."
    assert changed
    assert all(name.startswith(last) for name in changed)


def test_a_copy_of_a_layer_has_tensors_of_its_own() -> None:
    """Stages copy partly frozen layers: a deep copy has tensors of its own, and torch gives no warning."""
    task = plain_models.build({"model": "dictionaries"})
    inputs, _ = task.dataset.batch([0, 1])
    for index in (0, len(task.layers) - 1):
        layer = build_layer(task, 5, index)
        copied = deepcopy(layer)
        own, others = dict(layer.named_parameters()), dict(copied.named_parameters())
        assert own.keys() == others.keys()
        assert all(torch.equal(own[name], others[name]) and own[name] is not others[name] for name in own)
    first = build_layer(task, 5, 0)
    for one, other in zip(first(*inputs), deepcopy(first)(*inputs), strict=True):
        assert torch.equal(one, other)


def test_the_whole_model_is_never_held() -> None:
    """Of a model with 160 TB of weights, the first and the last layer can be built, and all layers' costs counted."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 1)
            self.blocks = nn.ModuleList(nn.Linear(1, 10_000_000, bias=False) for _ in range(2))
            self.blocks.extend(nn.Linear(1_000_000, 10_000_000, bias=False) for _ in range(4))
            self.last = nn.Linear(10_000_000, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x[..., : block.in_features])
            out: Tensor = self.last(x)
            return out

    data = TensorDataset((torch.rand(8, 4),), (torch.rand(8, 1),))
    task = from_module(
        Huge, loss=squared_error, dataset=data, optimizer=plain_models.optimizer, learning_rate=lambda _: 1.0
    )
    assert build_layer(task, 0, 0).module.first.weight.shape == (1, 4)
    assert build_layer(task, 0, 7).module.last.weight.shape == (1, 10_000_000)
    costs = layer_costs(task, 2)
    assert len(costs) == 8
    assert min(costs[3:7]) > 1e14 > costs[7] > costs[0]


def test_the_lists_that_a_parametrization_keeps_are_no_blocks() -> None:
    make = model_of(lambda m, x: m.norm(m.blocks[2](m.blocks[1](m.blocks[0](x)))))

    def parametrized() -> nn.Module:
        model: nn.Module = make()
        model.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        return model

    assert len(from_module(parametrized, **small()).layers) == 4


def test_a_block_that_uses_what_it_does_not_have_is_refused() -> None:
    class Outside(nn.Module):
        def __init__(self, shared: list[nn.Module]) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.shared[0](x)
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.blocks = nn.ModuleList(Outside([self.norm]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)) * 1

    with pytest.raises(ValueError, match=r"blocks.0 uses norm.weight, which it does not have"):
        from_module(Model, **small())


MODELS = ("chain", "dictionaries", "sizes", "encoded", "normed")


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_compute_what_the_model_computes(name: str) -> None:
    """Layers have the model's loss and gradients, also for a number of samples that was not recorded."""
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
    """A model with a BatchNorm in its own code. frozen: the BatchNorm is in eval mode."""

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
    """A frozen norm before the blocks contributes no statistics, and its layer lacks the unused count of batches."""
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


def test_metrics_get_what_the_loss_gets() -> None:
    """Metrics of a step and of an evaluation get the model's dictionary and the targets."""

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
