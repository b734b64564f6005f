"""The determinism guard: it names the layer or the workers whose bits differ, and lets deterministic tasks train."""

import random
import re
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.engine.determinism import EVERY, StateChecks, is_due
from bamboo_trainer.task import Parts, add_loss
from bamboo_trainer.tasks.task_errors import NotDeterministic, TaskError
from determinism_kit import Late, between
from stage_kit import chain, one_step, small_task
from training_job import Fault, Job, job_of


class Here(dict[int, Any]):
    """A stand-in for a worker's states: a dict by stage with the method `here`."""

    here = dict.get


class Noisy(torch.optim.SGD):
    """An optimizer that adds a random number to a parameter from the third step on."""

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
    """A job of 40 steps ends after step 4 if an owner and a replica, or two pipelines' owners, have different bits."""
    message = r"other bits of stage \d after 4 steps; first difference: parameter 'bias' of layer \d \(Linear\)"
    assert re.search(message, why_failed(job_of(NOISY, grid, 40, mode).run()))


@pytest.mark.parametrize(("grid", "mode"), [((2, 1), "Replicas"), ((1, 2), "None")])
def test_a_job_that_says_it_is_not_deterministic_is_not_compared(grid, mode) -> None:
    """With deterministic: false, workers send no checksums of states, so different bits do not end the job."""
    assert job_of(NOISY, grid, 6, mode, deterministic=False).run().end.reason == "Complete"


def test_states_that_differ_as_they_were_built_end_the_job_at_once() -> None:
    """Initial states that differ, because of the hardware or the order of a set, end the job at once."""
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
    """A worker sends a checkpoint's checksums again: without them, the coordinator does not commit the checkpoint."""
    states, said = Here(), list[Any]()
    log = SimpleNamespace(commits={10: SimpleNamespace(checkpoint="a")}, end=None)
    ports = SimpleNamespace(steps=17, deterministic=True)
    coordinator = SimpleNamespace(tell=said.append)
    checks = StateChecks(SimpleNamespace(states=states, log=log, coordinator=coordinator, ports=ports))  # type: ignore[arg-type]
    for version in range(18):
        states[0] = SimpleNamespace(version=version, checksums=lambda: {"w": 1})
        checks.look(0)
    said.clear()
    checks.report()
    assert [one.version for one in said] == [11, 16, 17]


CALM = 20  # calls
STEPS = 40


class LateLayer(nn.Linear):
    """A layer that is deterministic only in its first CALM calls."""

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
    """A layer that computes another function after CALM calls, so that two workers past that call agree."""

    def late(self, x):
        return x * 1.001


class Elsewhere(LateLayer):
    """A layer whose late results depend on its instance's number, which stands for the process."""

    def late(self, x):
        return x * (1 + 1e-6 * self.number)


class Scaled(torch.autograd.Function):
    """A function with a deterministic forward and a backward that is not deterministic."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-6 * float(np.random.rand()))


class Behind(LateLayer):
    def late(self, x):
        return Scaled.apply(x)


def job(grid: tuple[int, int], *layers: Any, mode: str = "Replicas", deterministic: bool = True, **task: Any) -> Job:
    made = small_task(layers=layers, costs=[1] * len(layers), **task)
    return job_of(made, grid, STEPS, mode, deterministic=deterministic)


def why_ended(job: Job) -> str:
    """Run a job whose results differ. Return the message of the NotDeterministic that a worker raises or, if none
    does, the coordinator's message at the job's end (ResultsDiffer).
    """
    try:
        job.run()
    except NotDeterministic as error:
        return str(error)
    assert job.end.reason == "ResultsDiffer"
    return job.end.message


def linear() -> nn.Module:
    return nn.Linear(2, 2)


class Dropped(nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.from_numpy(np.random.rand(*x.shape).astype("float32"))


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Timed(nn.Linear):
    def forward(self, x):
        return super().forward(x) + time.perf_counter_ns() % 1_000_003


class Seldom(nn.Linear):
    """A layer that skips its work too rarely for a spot check to notice."""

    def forward(self, x):
        return x if random.random() < 1e-12 else super().forward(x)


class Product(torch.autograd.Function):
    numbers = count()

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) + next(Product.numbers)


class OwnBackward(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.bias)


class Reading(nn.BatchNorm1d):
    """A norm that uses running statistics in training."""

    def forward(self, x):
        return super().forward(x) + self.running_mean


class ReadingFirst(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x - self.running_var)[:, :1] * self.running_var


class WarmingUp(nn.BatchNorm1d):
    """A norm that normalizes from the fourth batch on."""

    def forward(self, x):
        normed = super().forward(x)
        return normed if self.num_batches_tracked >= 4 else x


class HardCoded(nn.BatchNorm1d):
    """A norm that ignores its attribute `momentum`."""

    def forward(self, x):
        with torch.no_grad():
            self.running_mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return x


class Adds(nn.Linear):
    numbers = count()

    def forward(self, x):
        add_loss(x.sum() * next(self.numbers), "a")
        return super().forward(x)


def of(kind: type[nn.Module], *given: int) -> Any:
    return partial(kind, *given)


AT_ONCE = {
    "numpy": (of(Dropped, 2, 2), r"layer 0 \(Dropped\) is not deterministic: it draws from numpy.random; use torch's"),
    "Python": (
        of(Seldom, 2, 2),
        r"layer 0 \(Seldom\) is not deterministic: it draws from Python's random; use torch's",
    ),
    "calls": (of(Counting, 2, 2), r"the output of layer 0 \(Counting\) is not deterministic: in step 1, microbatch 0"),
    "time": (of(Timed, 2, 2), r"the output of layer 0 \(Timed\) is not deterministic: .*; usual causes"),
    "backward": (of(OwnBackward, 2, 2), r"the gradient of the parameters, .*, of layers 0 to 0 is not deterministic"),
    "added": (of(Adds, 2, 2), "what layers 0 to 0 pass on, or add to the loss, is not deterministic"),
    "statistics": (of(Reading, 2), r"layer 0 \(Reading\) is not .* come out with other running statistics: a module"),
    "statistics before": (of(ReadingFirst, 2), r"layer 0 \(ReadingFirst\) is not .* other running statistics"),
    "warming up": (of(WarmingUp, 2), r"layer 0 \(WarmingUp\) is not .* come out with other running statistics"),
    "momentum": (
        of(HardCoded, 2),
        "parameters, or running statistics, of layers 0 to 0 is not deterministic",
    ),
}


@pytest.mark.parametrize(("grid", "mode"), [((2, 1), "Replicas"), ((2, 1), "None"), ((1, 2), "None")])
@pytest.mark.parametrize("case", AT_ONCE)
def test_a_layer_is_named_in_the_first_step(case, grid, mode) -> None:
    layer, message = AT_ONCE[case]
    found = job(grid, layer, linear, mode=mode)
    assert re.search(message.replace("0 to 0", rf"0 to {2 - grid[0]}"), why_ended(found))
    assert found.state.step <= 1


@pytest.mark.parametrize("part", ["inputs", "targets", "loss"])
def test_so_are_a_dataset_and_a_loss(part) -> None:
    class Augmented(TensorDataset):
        def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
            (inputs,), (targets,) = super().batch(indices)
            noise = torch.from_numpy(np.random.randn(*inputs.shape).astype("float32"))
            return ((inputs + noise,), (targets,)) if part == "inputs" else ((inputs,), (targets + noise,))

    def loss(outputs: Parts, targets: Parts) -> torch.Tensor:
        return (outputs[0] - targets[0]).square().mean() * random.random()

    points = torch.arange(24.0).reshape(12, 2)
    changes: Any = {"loss": loss} if part == "loss" else {"dataset": Augmented((points,), (points,))}
    found = why_ended(job((2, 1), linear, linear, **changes))
    what = "the output of layer 1 (Linear), or the loss of it," if part == "loss" else "the dataset's batch"
    assert f"{what} is not deterministic: in step 1" in found


LATE = (Draws, Counts, Switches, Elsewhere, Behind)
CELL = r"layers? {}.* in step (6|12|20|30|38), microbatch"
ALONE = r"(w0 came to other bits than it came to at first|as it was built)"


@pytest.mark.parametrize(
    ("grid", "mode", "late", "place", "message"),
    [
        *(
            ((2, 1), mode, late, (row + column) % 2, CELL.format((row + column) % 2))
            for row, late in enumerate(LATE)
            for column, mode in enumerate(("None", "Replicas"))
        ),
        *(((1, 2), "None", late, 0, r"layers? .* in step \d+, microbatch") for late in LATE),
        *(((1, 1), "None", late, 0, ALONE) for late in LATE if late is not Elsewhere),
    ],
)
def test_what_begins_late_is_found_by_a_replica_another_pipeline_or_the_only_worker(
    grid, mode, late, place, message
) -> None:
    layers: list[Any] = [linear, linear]
    layers[place] = late
    assert re.search(message, why_ended(job(grid, *layers, mode=mode)))


@pytest.mark.parametrize(
    "lost", [(), (Fault("ReduceGradients", Cell(1, 0), 20), Fault("GatherGradients", Cell(1, 1), 20))]
)
def test_nobody_looks_where_results_may_differ(lost) -> None:
    """With deterministic: false, results may differ in any step, between holders of a state, and after a kill."""
    fickle = job((2, 2), of(Dropped, 2, 2), of(Draws), deterministic=False)
    fickle.faults = [*lost]
    assert fickle.run().finish.outcome is Outcome.COMPLETE


class Harmless(nn.Linear):
    """A layer that counts its calls, and keeps a table from the first one."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.width, self.table = 0, None, None

    def forward(self, x):
        self.calls += 1
        if self.width is None:
            self.width, self.table = x.shape[-1], torch.full((x.shape[-1],), 0.5)
        return super().forward(x) * self.table


class Seeds(nn.Linear):
    """A layer that draws from generators that it seeds itself."""

    def forward(self, x):
        random.seed(5)
        np.random.seed(5)
        return super().forward(x) * random.random() * float(np.random.rand())


class Reentrant(nn.Linear):
    def forward(self, x):
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(super().forward, x * 1, use_reentrant=True)
        return y


@pytest.mark.parametrize("kind", [Seeds, Reentrant])
def test_what_is_deterministic_is_let_through(kind) -> None:
    done = job((1, 1), linear, of(kind, 2, 2)).run()
    assert done.end.outcome is Outcome.COMPLETE


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2)])
def test_what_a_layer_counts_and_keeps_is_harmless_if_its_results_do_not_depend_on_it(grid) -> None:
    done = job(grid, Harmless, Harmless).run()
    assert done.end.outcome is Outcome.COMPLETE
    assert sum(fault.name == "SpotCheck" for fault in done.executed) >= 6 * 2


class Initialized(nn.Linear):
    """A layer that sets its bias from the first microbatch that it sees."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.ready, self.bias.data = True, -x.detach().mean(0)
        return super().forward(x)


def test_parameters_that_the_first_call_sets_are_no_function_of_the_state() -> None:
    with pytest.raises(NotDeterministic, match=r"writes to its parameters in a forward when 'ready' of Initialized"):
        job((1, 1), Initialized, linear, mode="None").run()
