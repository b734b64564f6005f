"""What no forward may change is refused before the step is applied."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bamboo_trainer.tasks.user_code import TaskError
from determinism_kit import Late, between
from stage_kit import chain, one_step, whole_state

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
    """There are three calls in each step."""
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
    """An adapter's base that the task has made once; a checkpoint of other values is theirs, too."""
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
