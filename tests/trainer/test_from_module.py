"""A plain module is split into layers that compute what it computes, and is refused with a reason if it cannot be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import plain_models
from bamboo.planning.plan import Cell
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.reference import train
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.running_buffers import running_modules
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, run_layer
from bamboo_trainer.training import TrainingConfig
from from_module_kit import TwoArguments, model_of, small
from manifest_kit import bamboojob, training
from training_job import Fault, Job, check_same_bits

MODELS = ("chain", "dictionaries", "sizes", "encoded", "normed")


def layers_of(task: Task) -> list[nn.Module]:
    layers = [build_layer(task, 0, n) for n in range(len(task.layers))]
    tie(dict(enumerate(layers)), tied_groups(task), task, 0)
    return layers


def whole(task: Task, make: Callable[[], nn.Module]) -> tuple[list[nn.Module], nn.Module]:
    """The layers, and the model in one with their values."""
    layers, model = layers_of(task), make()
    state = {k.removeprefix("module."): t for layer in layers for k, t in layer.state_dict().items()}
    model.load_state_dict(state)
    return layers, model


def run(layers: list[nn.Module], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    passed: Any = inputs
    for number, layer in enumerate(layers):
        passed = run_layer(layer, number, passed, lambda given, layer=layer: call_layer(layer, given))
    return tuple(passed)


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
    expected = given["loss"](output, targets[0])
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {k.removeprefix("module."): p.grad for layer in layers for k, p in layer.named_parameters()}
    named = dict(model.named_parameters())
    assert gradients.keys() >= named.keys()
    for key, parameter in named.items():
        torch.testing.assert_close(gradients[key], parameter.grad)


def job(name: str, stages: int, pipelines: int, *faults: Fault) -> Job:
    document = bamboojob(
        task={"entrypoint": "plain_models:build", "config": {"model": name}},
        training=training(3, 8, 2, maxGradientNorm=1.0),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "EagerForward"},
        elastic={"minStages": stages, "stabilizationSeconds": 0},
    )
    return Job(document, faults=faults).run()


LOSSES = [
    ("chain", 2, 2), ("dictionaries", 4, 1), ("normed", 4, 1),
    *(pytest.param(name, stages, pipelines, marks=pytest.mark.slow) for name, stages, pipelines in (
        ("chain", 4, 1), ("dictionaries", 4, 2), ("dictionaries", 2, 1), ("sizes", 4, 1), ("encoded", 2, 2),
        ("normed", 2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages", "pipelines"), LOSSES)
def test_a_worker_is_lost_and_the_bits_stay(name: str, stages: int, pipelines: int) -> None:
    calm = job(name, stages, pipelines)
    fault = [f for f in calm.executed if f.step == 1 and f.cell == Cell(0, 1)][2]
    killed = job(name, stages, pipelines, fault)
    check_same_bits(calm, killed)
    assert killed.state.losses == calm.state.losses
    task = plain_models.build({"model": name})
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=1.0, microbatches=4, micro_batch_size=2)
    losses, _ = train(task, config, 3)
    torch.testing.assert_close(list(calm.state.losses.values()), list(losses), rtol=1e-5, atol=1e-6)


def under_autocast(model: Any, x: Tensor) -> Tensor:
    x = model.norm(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for block in model.blocks:
            x = block(x)
    return x.float()


def without_autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        for block in model.blocks:
            x = block(x)
    return x.float()


def partly_without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.blocks[1](model.blocks[0](model.norm(x)))
    return model.blocks[2](x)  # type: ignore[no-any-return]


def through_a_view(model: Any, x: Tensor) -> Tensor:
    y = model.norm(x)
    x = model.blocks[0](y * 1)
    x[:, :3].mul_(2)
    x = model.blocks[1](x)
    y[:, 1:].add_(1)
    return model.blocks[2](x) + y  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", [under_autocast, without_autocast, partly_without_gradients, through_a_view])
def test_what_the_forward_does_around_and_between_blocks_is_done(forward: Any, precision: torch.dtype) -> None:
    """Also in a job whose own precision is bf16."""
    make = model_of(forward)
    task = from_module(make, **small())
    layers, model = whole(task, make)
    inputs, targets = task.dataset.batch([1, 4, 5])
    with torch.autocast("cpu", dtype=precision, enabled=precision is not torch.float32):
        results, expected = run(layers, inputs), model(*inputs)
    assert torch.equal(results[0], expected)
    task.loss((results[0].float(),), targets).backward()
    nn.functional.mse_loss(expected.float(), targets[0]).backward()
    named = {k.removeprefix("module."): p.grad for layer in layers for k, p in layer.named_parameters()}
    for key, parameter in model.named_parameters():
        assert (named[key] is None) == (parameter.grad is None), key
        if parameter.grad is not None:
            torch.testing.assert_close(named[key], parameter.grad)


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
    return [found for layer in layers_of(from_module(make, **small())) for found in running_modules(layer)]


def test_a_frozen_norm_before_the_blocks_stays_as_it_is() -> None:
    """Its count is no part of the layer that computes it, as that does not use it."""
    assert [found.contributes for found in running(lambda: Normed(frozen=True))] == [False]
    assert [found.names for found in running(lambda: Normed(frozen=True))] == [("running_mean", "running_var")]
    assert [found.contributes for found in running(lambda: Normed(frozen=False))] == [True]


def test_a_model_that_is_made_in_eval_mode_is_trained_as_a_plain_loop_would() -> None:
    assert [found.contributes for found in running(lambda: Normed(frozen=True).eval())] == [True]
    layers = layers_of(from_module(lambda: Normed(frozen=False).eval(), **small()))
    assert all(m.training for layer in layers for m in layer.modules() if isinstance(m, nn.Dropout))


def test_a_layer_has_the_same_values_whoever_makes_it_and_another_one_has_others() -> None:
    one, other = (plain_models.build({"model": "dictionaries"}) for _ in range(2))
    third = build_layer(one, 5, 3).state_dict()
    assert all(torch.equal(t, third[k]) for k, t in build_layer(other, 5, 3).state_dict().items())
    fourth = build_layer(other, 5, 4).state_dict()
    weight = "module.blocks.{}.linear.weight"
    assert not torch.equal(third[weight.format(2)], fourth[weight.format(3)])


def test_the_whole_model_is_never_held() -> None:
    """Its blocks would take 160 TB; the first and the last layer are made all the same, and costs are counted."""

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
        Huge, loss=nn.MSELoss(), dataset=data, optimizer=plain_models.optimizer, learning_rate=lambda _: 1.0
    )
    assert build_layer(task, 0, 0).module.first.weight.shape == (1, 4)
    assert build_layer(task, 0, 7).module.last.weight.shape == (1, 10_000_000)
    costs = layer_costs(task, 2)
    assert len(costs) == 8
    assert min(costs[3:7]) > 1e14 > costs[7] > costs[0]


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


def test_a_block_whose_way_depends_on_values_is_run_with_some() -> None:
    """And one of its class is, not all."""
    runs = []

    class Routed(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            runs.append(isinstance(x, FakeTensor))
            return x.index_add(0, rows, super().forward(x[rows])), 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Routed(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, _ = block(x)
            return x

    task = from_module(Model, **small())
    assert runs == [False]
    layers, model = whole(task, Model)
    x = torch.randn(6, 4)
    assert torch.equal(run(layers, (x,))[0], model(x))


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


def test_what_depends_on_values_and_not_on_shapes_is_refused_when_it_shows() -> None:
    """A mask that is left out when it masks nothing: what is passed on would differ from microbatch to microbatch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(TwoArguments() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            mask = x * 1
            if not isinstance(x, FakeTensor) and bool((x > 0).all()):
                mask = 0
            for block in self.blocks:
                x = block(x, mask)
            return x

    layers = layers_of(from_module(Model, **small()))
    run(layers, (torch.tensor([[1.0, 0.0, 1.0, 1.0]]),))
    with pytest.raises(ValueError, match=r"blocks.0 is called with something else than when the model was split"):
        run(layers, (torch.ones(1, 4),))
