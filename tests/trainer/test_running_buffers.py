"""Running statistics, equal to plain PyTorch's on any split and unchanged by repeated forwards; refused norms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
import running_tasks
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.running_buffers import evaluating, intercept
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import settled
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig
from running_tasks import build
from stage_kit import CONFIG as SMALL
from stage_kit import begin, chain, microbatch, one_step, small_task, state_of

STEPS, MICROBATCHES = 5, 4
CONFIG = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=MICROBATCHES, micro_batch_size=3)
SPLITS = ([(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)])
BUFFERS = (
    *(f"layers.0.{norm}.{name}" for norm in ("even", "bare", "frozen") for name in ("running_mean", "running_var")),
    "layers.0.even.num_batches_tracked",
    "layers.1.norm.running_var",
    "layers.1.inner.running_mean",
    "layers.2.late.running_mean",
    "layers.2.norm.running_mean",
)


def plainly(config: TrainingConfig, steps: int) -> dict[str, Tensor]:
    """Train in plain PyTorch, one microbatch after the other. Return the final state by its names in `state_of`."""
    task = build({})
    model = nn.Sequential(*(build_layer(task, config.seed, i) for i in range(len(task.layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(config.microbatches):
            torch.manual_seed(0)  # dropout is switched off: the seeds are Bamboo's own
            (x,), targets = task.dataset.batch(config.samples(step, number, task.dataset))
            loss = task.loss((model(x),), targets)
            (loss / config.microbatches).backward()
        optimizer.step()
    return {f"layers.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.fixture
def without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "dropout", lambda given, p, train: given)


@pytest.mark.usefixtures("without_dropout")
@pytest.mark.parametrize("checkpointed", [(), range(4)])
def test_buffers_are_those_of_plain_pytorch(checkpointed: Any) -> None:
    task = build({"checkpointed": checkpointed})
    with pytest.MonkeyPatch.context() as patch:  # in plain PyTorch what a layer checkpoints itself counts twice
        patch.setattr(running_tasks, "checkpoint", lambda run, given, use_reentrant: run(given))
        expected = plainly(CONFIG, STEPS)
        torch.testing.assert_close(reference.train(task, CONFIG, STEPS)[1], expected, rtol=1e-5, atol=1e-5)
    for split in SPLITS:
        stages = chain(task, split, CONFIG)
        for step in range(STEPS):
            one_step(stages, step, CONFIG)
        state = state_of(stages)
        for name, value in state.items():  # batches of a norm that some microbatches pass by weigh nearly the same
            close = 1e-2 if ".late.running" in name else 1e-5
            torch.testing.assert_close(value, expected[name], rtol=close, atol=close)
        before = build_layer(task, 0, 0)
        assert torch.equal(state["layers.0.frozen.running_mean"], before.frozen.running_mean)
        assert state["layers.0.even.num_batches_tracked"] == STEPS * MICROBATCHES
        assert state["layers.1.norm.num_batches_tracked"] == 2 * STEPS * MICROBATCHES
        assert 0 < state["layers.2.late.num_batches_tracked"] < STEPS * MICROBATCHES
        assert set(BUFFERS) <= state.keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forward_leaves_buffers_as_they_are_however_often_it_is_run(precision: str) -> None:
    """Repeated forwards, rehearsals, evaluations, and recomputation in backwards leave buffers as they are."""
    task, config = build({"checkpointed": (1,)}), replace(CONFIG, precision=precision)
    stages = chain(task, SPLITS[1], config)
    sums = [stage.values.checksums() for stage in stages]
    works = [begin(stage, *range(MICROBATCHES)) for stage in stages]
    for number in range(MICROBATCHES):
        microbatch(stages, works, 0, number)
    once = [work.gradients.total() for work in works]
    again = [begin(stage, *range(MICROBATCHES)) for stage in stages]
    for number in (2, 0, 1, 3, 1):
        stages[1].forward(again[1], 0, number, stages[0].forward(again[0], 0, number, None))
    for number in range(MICROBATCHES):
        stages[0].backward(again[0], 0, number, stages[1].backward(again[1], 0, number, None))
    stages[0].rehearse(0, 1, None)
    with evaluating([layer for stage in stages for layer in stage.values.layers.values()]):
        works = [begin(stage, *range(MICROBATCHES)) for stage in stages]
        stages[1].forward(works[1], 0, 0, stages[0].forward(works[0], 0, 0, None))
        assert [work.statistics for work in works] == [{}, {}]
    assert not stages[0].values.layers[0].frozen.training
    assert stages[0].values.layers[0].even.training
    for expected, work in zip(once, again, strict=True):
        assert torch.equal(work.gradients.total(), expected)
    assert [stage.values.checksums() for stage in stages] == sums


# what cannot be


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, given: Tensor) -> Tensor:
        self.mean.add_(given.detach().mean(0))
        return given


STRAY = nn.BatchNorm1d(2, affine=False)
intercept(STRAY)


class Strays(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return STRAY(given)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Writes, r"layer 1 \(Writes\) changes its buffer 'mean' in the forward, so a repeated forward would differ$"),
        (Strays, "a forward uses BatchNorm1d with running statistics, which is none of the layer's modules"),
    ],
)
def test_what_cannot_be_treated_so_is_refused_by_name(layer: Callable[[], nn.Module], message: str) -> None:
    task = small_task(layers=(lambda: nn.Linear(2, 2), layer, lambda: nn.Linear(2, 2)))
    with pytest.raises(TaskError, match=message):
        one_step(chain(task, [(0, 3)]), 0)


def shared_norm(training: bool) -> Task:
    norm = nn.BatchNorm1d(2).train(training)

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(2, 2), norm

        def forward(self, given: Tensor) -> Tensor:
            return self.norm(self.inner(given))

    return small_task(layers=(Uses, nn.Tanh, Uses))


def test_a_norm_that_layers_share_is_refused_unless_it_is_frozen() -> None:
    with pytest.raises(
        TaskError, match=r"0\.norm\.running_mean and 2\.norm\.running_mean are one buffer that a forward"
    ):
        settled(shared_norm(True), 0)
    one_step(chain(settled(shared_norm(False), 0), [(0, 2), (2, 3)]), 0)


def test_a_norm_that_a_factory_hands_out_again_is_copied_for_each_stage() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    task = settled(small_task(layers=(lambda: nn.Linear(2, 2), lambda: norm, lambda: nn.Linear(2, 2))), 0)
    one, other = (chain(task, [(0, 3)])[0] for _ in range(2))
    one_step([one], 0, SMALL)
    assert one.values.digest() != other.values.digest()
    one_step([other], 0, SMALL)
    assert one.values.digest() == other.values.digest()
    assert norm.num_batches_tracked == 0


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.run = torch.compile(self.body, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_norm_may_be_in_a_compiled_forward() -> None:
    stages = chain(small_task(layers=(Compiled, nn.Tanh, lambda: nn.Linear(3, 2))), [(0, 3)])
    one_step(stages, 0)
    assert state_of(stages)["layers.0.body.1.num_batches_tracked"] == SMALL.microbatches


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)), "weight"),
        (lambda: nn.utils.spectral_norm(nn.Linear(2, 3)), "weight"),
        (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3))), "0.weight"),
    ],
)
def test_spectral_norm_is_refused_by_name_unless_it_is_frozen(norm: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(TaskError, match=rf"^layer 1 \(\w+\) has spectral_norm on {name!r}, .* eval mode"):
        build_layer(small_task(layers=(nn.Tanh, norm)), 0, 1)
    one_step(chain(small_task(layers=(lambda: norm().eval(), nn.Tanh, lambda: nn.Linear(3, 2))), [(0, 3)]), 0)
