"""What is not deterministic and begins late ends a job by name, and what is deterministic never does."""

import re
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import manifest
from torch import nn

import reference
from bamboo_core.coordinator.events import Outcome
from bamboo_trainer.tasks.inspection.determinism import NotDeterministic
from stage_kit import small_task
from training_job import Job

CALM = 20  # calls
STEPS = 40
MODES = ["None", "Replicas"]


class LateLayer(nn.Linear):
    """Deterministic for its first calls."""

    built = count()

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.number = 0, next(self.built)

    def forward(self, x):
        self.calls += 1
        result = super().forward(x)
        return result if self.calls <= CALM else self.late(result)


class Draws(LateLayer):
    def late(self, x):
        return x + 1e-6 * float(np.random.rand())


class Counts(LateLayer):
    def late(self, x):
        return x * (1 + 1e-6 * self.calls)


class Switches(LateLayer):
    """Every call from a certain one on does the same, so two workers that are both past it agree."""

    def late(self, x):
        return x * 1.001


class Elsewhere(LateLayer):
    """As if each process were another one."""

    def late(self, x):
        return x * (1 + 1e-6 * self.number)


class Scaled(torch.autograd.Function):
    """Its forward is deterministic, and its backward is not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-6 * float(np.random.rand()))


class Behind(LateLayer):
    def late(self, x):
        return Scaled.apply(x)


def job(
    monkeypatch: pytest.MonkeyPatch, grid: tuple[int, int], *layers: Any, mode: str = "Replicas", **spec: Any
) -> Job:
    def build(config: object) -> Any:
        return small_task(layers=layers, costs=[1] * len(layers))

    monkeypatch.setattr(reference, "build_late", build, raising=False)
    document = manifest(*grid, mode=mode, steps=STEPS)
    document["spec"]["task"] = {"entrypoint": "reference:build_late"}
    document["spec"]["training"] |= spec
    return Job(document)


def why_ended(job: Job) -> str:
    """What a worker raises that can tell that the task is not deterministic, or what the coordinator ends the job with
    where workers come to other bits, each always to the same.
    """
    try:
        job.run()
    except NotDeterministic as error:
        return str(error)
    assert job.finish is not None
    assert job.finish.reason == "ResultsDiffer"
    return job.finish.message


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("place", "late", "mode"),
    [
        ((row + column) % 2, late, mode)
        for row, late in enumerate((Draws, Counts, Switches, Elsewhere, Behind))
        for column, mode in enumerate(MODES)
    ],
)
def test_what_begins_late_is_found_in_every_mode(mode, late, place, monkeypatch) -> None:
    layers: list[Any] = [linear, linear]
    layers[place] = late
    found = job(monkeypatch, (2, 1), *layers, mode=mode)
    message = rf"layers? {place}.* in step (6|12|20|30|38), microbatch"
    assert re.search(message, why_ended(found))


@pytest.mark.parametrize("late", [Draws, Counts, Switches, Elsewhere, Behind])
def test_it_is_found_by_another_pipeline(late, monkeypatch) -> None:
    found = job(monkeypatch, (1, 2), late, linear, mode="None")
    assert re.search(r"layers? .* in step \d+, microbatch", why_ended(found))


@pytest.mark.parametrize("late", [Draws, Counts, Switches, Behind])
def test_it_is_found_by_the_only_worker(late, monkeypatch) -> None:
    found = job(monkeypatch, (1, 1), late, linear, mode="None")
    assert re.search(r"(w0 came to other bits than it came to at first|as it was built)", why_ended(found))


def test_nobody_looks_where_results_may_differ(monkeypatch) -> None:
    done = job(monkeypatch, (2, 1), Draws, linear, deterministic=False).run()
    assert done.finish.outcome is Outcome.COMPLETE


class Harmless(nn.Linear):
    """Counts its calls, and keeps a table that it makes in the first one."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.width, self.table = 0, None, None

    def forward(self, x):
        self.calls += 1
        if self.width is None:
            self.width, self.table = x.shape[-1], torch.full((x.shape[-1],), 0.5)
        return super().forward(x) * self.table


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2)])
def test_what_a_layer_counts_and_keeps_is_harmless_if_its_results_do_not_depend_on_it(grid, monkeypatch) -> None:
    done = job(monkeypatch, grid, Harmless, Harmless).run()
    assert done.finish.outcome is Outcome.COMPLETE
    assert sum(fault.name == "SpotCheck" for fault in done.executed) >= 5 * 2


class Initialized(nn.Linear):
    """Sets its parameters by the first microbatch that it sees."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.ready, self.bias.data = True, -x.detach().mean(0)
        return super().forward(x)


def test_parameters_that_the_first_call_sets_are_no_function_of_the_state(monkeypatch) -> None:
    with pytest.raises(NotDeterministic, match=r"writes to its parameters in a forward when 'ready' of Initialized"):
        job(monkeypatch, (1, 1), Initialized, linear, mode="None").run()
