"""Who holds other bits, and in which parameter."""

import random
import re
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_trainer.commit.state_checks import EVERY, StateChecks, is_due
from bamboo_trainer.tasks.task_errors import TaskError
from determinism_kit import Late, between
from stage_kit import chain, one_step, small_task
from training_job import Job, job_of


class Here(dict[int, Any]):
    """The states of stages that a worker holds."""

    here = dict.get


class Noisy(torch.optim.SGD):
    """Adds what nobody can repeat, from the third step on."""

    steps = 0

    def step(self):
        super().step()
        self.steps += 1
        if self.steps > 2:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].add_(random.random())


def why_failed(job: Job) -> str:
    assert job.end.reason == "ResultsDiffer"
    return job.end.message


NOISY = small_task(layers=[lambda: nn.Linear(2, 2)] * 2, optimizer=lambda named: Noisy([p for _, p in named], lr=0.1))


@pytest.mark.parametrize(("grid", "mode"), [((2, 1), "Replicas"), ((1, 2), "None"), ((2, 2), "Replicas")])
def test_holders_of_a_stage_whose_bits_differ_end_the_job_soon(grid, mode) -> None:
    """Owner and replica, or the owners of two pipelines: at the next comparison, after 4 of 40 steps."""
    message = r"other bits of stage \d after 4 steps; first difference: parameter 'bias' of layer \d \(Linear\)"
    assert re.search(message, why_failed(job_of(NOISY, grid, 40, mode).run()))


@pytest.mark.parametrize(("grid", "mode"), [((2, 1), "Replicas"), ((1, 2), "None")])
def test_a_job_that_says_it_is_not_deterministic_is_not_compared(grid, mode) -> None:
    """Neither are its states, nor is its optimizer tried."""
    assert job_of(NOISY, grid, 6, mode, deterministic=False).run().end.reason == "Complete"


def test_states_that_differ_as_they_were_built_end_the_job_at_once() -> None:
    """As by their hardware, or by the order of a set."""
    built = count()

    class Elsewhere(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.weight.data.fill_(next(built))

    job = job_of(small_task(layers=[Elsewhere], costs=[1]), (1, 2), 40, "None")
    message = r"w1 and w0 hold other bits of stage 0 as it was built; first difference: parameter 'weight' of layer 0"
    assert re.search(message, why_failed(job.run()))
    assert job.state.step == 0


def test_a_write_behind_torchs_back_is_seen_when_states_are_compared() -> None:
    stages = chain(between(lambda: Late(lambda layer: layer.table.data.add_(1), 4)), [(0, 3)])
    one_step(stages, 0)
    stages[0].values.checksums()
    one_step(stages, 1)
    with pytest.raises(TaskError, match=r"layer 1 \(Late\) changes its buffer 'table'"):
        stages[0].values.checksums()


def test_states_are_compared_early_and_then_regularly() -> None:
    assert [v for v in range(4 * EVERY + 1) if is_due(v)] == [0, 1, 2, 4, 8, 16, 32, 64, 96, 128]


def test_the_sums_of_a_checkpoint_are_told_again_also_after_those_of_newer_states() -> None:
    """They may be lost with a connection, and the coordinator commits the checkpoint when all have told them."""
    states, said = Here(), list[Any]()
    log = SimpleNamespace(commits={10: SimpleNamespace(checkpoint="a")}, end=None)
    coordinator = SimpleNamespace(tell=said.append)
    checks = StateChecks(states, log, coordinator, steps=17, deterministic=True)  # type: ignore[arg-type]
    for version in range(18):
        states[0] = SimpleNamespace(version=version, checksums=lambda: {"w": 1})
        checks.look(0)
    said.clear()
    checks.report()
    assert [one.version for one in said] == [11, 16, 17]
