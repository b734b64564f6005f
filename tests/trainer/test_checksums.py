"""Checksums of tensors and of a stage's state; refusal of states that cannot be sent, and of changed constants."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from bamboo_trainer.stage.checksums import CHUNK, checksum
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.tasks.task_errors import TaskError
from determinism_kit import Late, between
from stage_kit import CONFIG, chain, one_step, small_task, whole_state


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 2 * CHUNK + 7])
def test_a_sum_is_that_of_the_bits(dtype: torch.dtype, size: int) -> None:
    one = (torch.arange(size) % 2).to(dtype)
    assert checksum(one) == checksum(one.clone()) == checksum(one.reshape(1, -1))
    if size:
        other = one.clone()
        other[size // 2] = one[size // 2] == 0
        assert checksum(one) != checksum(other)
    if size > 2:
        assert checksum(one) != checksum(one.flip(0)) or torch.equal(one, one.flip(0))
        assert checksum(one[1:]) == checksum(one[1:].clone())


def test_a_sum_sees_what_cancels_out() -> None:
    """The checksum changes if values swap places, a zero changes its sign, or one value grows as another shrinks."""
    values = torch.ones(100_000)
    for a, b, changed in ((3, 70_000, 2.0), (5, 5 + 2 * CHUNK, 4.0)):
        one, other = values.clone(), values.clone()
        one[a], other[b] = changed, changed
        assert checksum(one) != checksum(other)
    assert checksum(torch.zeros(8)) != checksum(-torch.zeros(8))
    up_and_down = values.clone()
    up_and_down[10], up_and_down[11] = 1 + 2**-23, 1 - 2**-23
    assert checksum(values) != checksum(up_and_down)


def test_a_device_comes_to_the_sum_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (0, 5, 8, 1001)]
    here = [checksum(one) for one in tensors]
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert [checksum(one) for one in tensors] == here


class Rotary(nn.Linear):
    """A layer with a table of complex numbers, as rotary embeddings have it, cast to `dtype`."""

    def __init__(self, dtype=torch.complex64):
        super().__init__(2, 2)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).to(dtype))


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
def test_a_state_that_cannot_be_sent_is_refused_at_once():
    with pytest.raises(TaskError, match=r"^constant:0.turns is a tensor of torch.float8_e5m2, expected one of"):
        build_stage(small_task(layers=(partial(Rotary, torch.float8_e5m2),)), 0, [(0, 1)], CONFIG)

    class Graph(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("edges", torch.eye(2).to_sparse())

    with pytest.raises(TaskError, match=r"^constant:0.edges is a tensor of layout torch.sparse_coo, expected"):
        build_stage(small_task(layers=(Graph,)), 0, [(0, 1)], CONFIG)


class Small(torch.optim.SGD):
    """An optimizer that keeps its last gradients in float8."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad.to(torch.float8_e5m2)


def test_an_optimizer_whose_state_cannot_be_sent_is_refused_after_its_first_step():
    stage = build_stage(small_task(optimizer=lambda named: Small(named, lr=0.1)), 0, [(0, 3)], CONFIG)
    with pytest.raises(TaskError, match=r"^state:0.weight:last is a tensor of torch.float8_e5m2, expected one of"):
        one_step([stage], 0)


WHOLE = [(0, 3)]


def exchange(layer: Late) -> None:
    layer.table = layer.table + 1


def adapt(layer: Late) -> None:
    layer.adapter = nn.Parameter(torch.ones(3))


LATE = {
    "written": (lambda layer: layer.table.add_(1), "changes its buffer 'table'"),
    "exchanged": (exchange, "changes its buffer 'table'"),
    "made": (lambda layer: setattr(layer, "cache", torch.ones(3)), "changes its buffer 'cache'"),
    "frozen": (lambda layer: layer.frozen.mul_(2), "changes its frozen parameter 'frozen'"),
    "adapted": (adapt, "makes its parameter 'adapter'"),
    "replaced": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(3))), "makes its parameter 'weight'"),
}


@pytest.mark.parametrize("kind", LATE)
def test_what_first_changes_later_is_refused_before_that_step_is_applied(kind: str) -> None:
    """A layer that changes its tensors in its fifth call is refused in the second step, which is not applied."""
    act, named = LATE[kind]
    stages = chain(between(lambda: Late(act, 3 + 2)), [(0, 1), (1, 3)])
    one_step(stages, 0)
    with pytest.raises(TaskError, match=rf"layer 1 \(Late\) {named} in the forward, (so a repeated|after the)"):
        one_step(stages, 1)
    assert stages[1].values.version == 1


def test_a_buffer_that_is_written_with_the_same_bits_stays() -> None:
    stages = chain(between(lambda: Late(lambda layer: layer.table.copy_(torch.ones(3)), 5)), WHOLE)
    for step in range(3):
        one_step(stages, step)
    assert stages[0].values.checksums() == stages[0].values.checksums()


def test_two_stages_that_share_what_is_frozen_are_restored_one_after_the_other() -> None:
    """Two stages that share an adapter's frozen base can both restore another value of it, and train on."""
    base = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.weight = base, nn.Parameter(torch.ones(3))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given * self.base * self.weight

    stages = chain(between(Adapted), [(0, 2), (2, 3)])
    others = chain(between(Adapted), [(0, 2), (2, 3)])
    for value in (2.0, -0.0, 0.0):
        states = whole_state(stages[0])
        states[1] = replace(states[1], tensors={**states[1].tensors, "constant:1.base": torch.full((3,), value)})
        for stage in (stages[0], others[0]):
            stage.values.restore(states)
        assert torch.equal(base.view(torch.int32), torch.full((3,), value).view(torch.int32))
        one_step(stages, stages[0].values.version)
        one_step(others, others[0].values.version)
