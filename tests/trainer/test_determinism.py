"""What is not deterministic ends a job by name, soon, and before weights are saved."""

import cProfile
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reference
from bamboo_core.planning.plan import Cell
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection.determinism import NotDeterministic
from bamboo_trainer.tasks.user_code import TaskError
from determinism_kit import Late, between
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, begin, chain, microbatch, one_step, small_gpt, small_task
from training_job import Fault, Job

WHOLE = [(0, 3)]


def first(task, config=CONFIG, split=WHOLE) -> None:
    """The first microbatch of a job."""
    stages = chain(task, split, config)
    microbatch(stages, [begin(s) for s in stages], 0, 0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


class FromNumpy(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(3).astype("float32")))


class Table(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([random.random(), 0.0, 0.0]))


class Dropped(Scaled):
    def forward(self, x):
        return x * torch.from_numpy(np.random.rand(*x.shape).astype("float32")) * self.weight


class Counting(Scaled):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight / self.calls


class Timed(Scaled):
    def forward(self, x):
        return x * self.weight + time.perf_counter_ns() % 1_000_003


class Seldom(Scaled):
    """Left out so rarely that nobody sees it."""

    def forward(self, x):
        return x if random.random() < 1e-12 else x * self.weight


class SeldomByNumpy(Scaled):
    def forward(self, x):
        return x if np.random.uniform() < 1e-12 else x * self.weight


class Product(torch.autograd.Function):
    numbers = count()

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).flatten(0, -2).sum(0) + next(Product.numbers)


class OwnBackward(Scaled):
    def forward(self, x):
        return Product.apply(x, self.weight)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (FromNumpy, r"layer 1 \(FromNumpy\) .* built twice from the same seed, parameter 'weight' differs; .*numpy"),
        (Table, r"layer 1 \(Table\) is not deterministic: built twice from the same seed, buffer 'offsets' differs"),
        (Dropped, r"layer 1 \(Dropped\) is not deterministic: it draws from numpy.random; use torch's"),
        (Counting, r"layer 1 \(Counting\) .* run twice on the same microbatch, its output differs; usual"),
        (Timed, r"layer 1 \(Timed\) .* run twice on the same microbatch, its output differs"),
        (Seldom, r"layer 1 \(Seldom\) is not deterministic: it draws from Python's random; use torch's"),
        (SeldomByNumpy, r"layer 1 \(SeldomByNumpy\) is not deterministic: it draws from numpy.random; use torch's"),
        (OwnBackward, r"layer 1 \(OwnBackward\) .* the gradient of parameter 'weight' differs"),
    ],
)
@pytest.mark.parametrize("split", [WHOLE, [(0, 1), (1, 3)]], ids=str)
def test_a_layer_that_does_not_come_to_the_same_bits_is_named_at_the_start(layer, message, split) -> None:
    with pytest.raises(NotDeterministic, match=message):
        first(between(layer), split=split)


def test_numpys_generator_may_be_of_another_kind() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        first(between(Scaled))
        with pytest.raises(NotDeterministic, match=r"layer 1 \(SeldomByNumpy\) .* draws from numpy.random"):
            first(between(SeldomByNumpy))
    finally:
        np.random.set_bit_generator(before)


def test_a_loss_that_draws_from_python_is_refused() -> None:
    def loss(outputs: Parts, targets: Parts) -> torch.Tensor:
        return (outputs[0] - targets[0]).square().mean() * random.random()

    with pytest.raises(NotDeterministic, match="the loss is not deterministic: it draws from Python's random; use"):
        first(small_task(loss=loss))


@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_so_is_a_dataset_that_augments_as_it_likes(which: str) -> None:
    class Augmented(TensorDataset):
        def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
            (inputs,), (targets,) = super().batch(indices)
            noise = torch.from_numpy(np.random.randn(*inputs.shape).astype("float32"))
            return ((inputs + noise,), (targets,)) if which == "inputs" else ((inputs,), (targets + noise,))

    points = torch.arange(24.0).reshape(12, 2)
    message = rf"the dataset is not deterministic: asked twice for samples \[.*\], it returned different {which}; usual"
    with pytest.raises(NotDeterministic, match=message):
        first(small_task(dataset=Augmented((points,), (points,))))


class Seeds(Scaled):
    """Draws from generators that it seeds itself."""

    def forward(self, x):
        random.seed(5)
        np.random.seed(5)
        return x * self.weight * random.random() * float(np.random.rand())


class Mixed(nn.Module):
    """Integers, what nobody uses, and a dropout of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return torch.dropout(self.linear(x) * self.frozen, 0.5, True), torch.ones(2, dtype=torch.long)


class Unmixed(nn.Module):
    def forward(self, x, ones):
        return x * ones[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", [(Seeds, nn.Tanh), (Mixed, Unmixed)], ids=["seeds", "mixed"])
def test_what_is_deterministic_is_let_through_and_trains_as_before(layers, precision) -> None:
    task = small_task(layers=(lambda: nn.Linear(2, 3), *layers, lambda: nn.Linear(3, 2)))
    config = replace(CONFIG, precision=precision)
    stages = chain(task, [(0, 2), (2, 4)], config)
    losses, _ = reference.train(task, config, 3)
    assert [one_step(stages, k, config) for k in range(3)] == pytest.approx(losses, rel=1e-2)


def test_a_checkpoint_that_runs_a_backward_of_its_own_is_let_through(caplog: pytest.LogCaptureFixture) -> None:
    """Torch cannot be asked for some of its gradients; forwards are looked at all the same."""

    class Reentrant(nn.Module):
        def __init__(self, draws: bool) -> None:
            super().__init__()
            self.inner, self.draws = nn.Linear(3, 3), draws

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x * 1, use_reentrant=True)
            return y * random.random() if self.draws else y

    split = [(0, 1), (1, 3)]
    assert one_step(chain(between(lambda: Reentrant(draws=False)), split), 0) > 0
    (message,) = caplog.messages
    assert message == "the backward of layer 1 (Reentrant) was not checked: it has a checkpoint with use_reentrant=True"
    with pytest.raises(NotDeterministic, match="layer 1"):
        one_step(chain(between(lambda: Reentrant(draws=True)), split), 0)


def test_a_profiler_that_runs_already_stays() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        first(small_task())
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_tied_layers_are_not_as_they_were_built_and_that_is_right(tmp_path, checkpoint) -> None:
    task = small_gpt(tmp_path, tieEmbeddings=True, checkpoint=checkpoint)
    stages = chain(task, [(0, 2), (2, 4)])
    losses, _ = reference.train(task, CONFIG, 2)
    assert [one_step(stages, k) for k in range(2)] == pytest.approx(losses, rel=1e-5)


def test_only_the_owner_of_a_first_state_looks() -> None:
    """A replica rehearses what the owner has looked at; who takes over later has no time for it."""
    task = between(Counting)
    stage = build_stage(task, 0, WHOLE, CONFIG)
    stage.rehearse(0, 0, None)
    stage = build_stage(task, 0, WHOLE, CONFIG)
    stage.values.version = 7
    stage.forward(begin(stage), 7, 0, None)


def test_a_write_behind_torchs_back_is_seen_when_states_are_compared() -> None:
    stages = chain(between(lambda: Late(lambda layer: layer.table.data.add_(1), 7)), WHOLE)
    one_step(stages, 0)
    stages[0].values.checksums()
    one_step(stages, 1)
    with pytest.raises(TaskError, match=r"layer 1 \(Late\) changes its buffer 'table'"):
        stages[0].values.checksums()


def restless(config: Mapping[str, Any]) -> Task:
    """Draws from Python's generator, as a kernel that adds in any order would give other bits each time."""

    class Restless(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given) * (1 + random.random() * 1e-3)

    return small_task(layers=(lambda: Restless(2, 3), nn.Tanh, lambda: nn.Linear(3, 2)))


def restless_job(*faults: Fault, **more: Any) -> Job:
    document = bamboojob(
        task={"entrypoint": "test_determinism:restless"},
        training=training(36, 4, 2, **more),
        topology={"stages": 2, "pipelines": 2},
    )
    return Job(document, faults).run()


def test_nobody_looks_if_the_job_does_not_have_to_be_deterministic() -> None:
    """Neither before the first step, nor at steps at which copies are compared, nor at the end."""
    with pytest.raises(NotDeterministic, match=r"layer 0 \(Restless\)"):
        restless_job()
    faults = [Fault(name, Cell(1, stage), 20) for stage, name in enumerate(("ReduceGradients", "GatherGradients"))]
    for job in (restless_job(deterministic=False), restless_job(*faults, deterministic=False)):
        assert job.finish is not None
        assert job.finish.reason == "Complete", job.finish
