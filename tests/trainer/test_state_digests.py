"""Digests of a stage's state, computed once, and states that cannot be sent."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.stage.state import state_digests
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, one_step, small_task, whole_state


def test_a_digest_is_computed_once_for_each_state(monkeypatch):
    one, other = (build_stage(small_task(), 0, [(0, 3)], replace(CONFIG, seed=s)) for s in (3, 4))
    computed = []
    digest = state_digests.digest
    monkeypatch.setattr(state_digests, "digest", lambda *state: computed.append(1) or digest(*state))
    first = one.values.digest()
    assert one.values.digest() == first
    assert len(computed) == 1
    one_step([one], 0)
    second = one.values.digest()
    assert second != first
    one.values.restore(whole_state(other))
    assert one.values.digest() == other.values.digest() not in (first, second)
    assert len(computed) == 4


class Rotary(nn.Linear):
    """Has a table, as rotary embeddings have one."""

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
    """Remembers its last gradients in few bits."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad.to(torch.float8_e5m2)


def test_an_optimizer_whose_state_cannot_be_sent_is_refused_after_its_first_step():
    stage = build_stage(small_task(optimizer=lambda named: Small(named, lr=0.1)), 0, [(0, 3)], CONFIG)
    with pytest.raises(TaskError, match=r"^state:0.weight:last is a tensor of torch.float8_e5m2, expected one of"):
        one_step([stage], 0)
