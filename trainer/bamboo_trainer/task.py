"""The task, which a user defines by `build(config) -> Task` or `build(config, training) -> Task`: model, data, loss."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from bamboo_trainer.callbacks import MakeCallback
from bamboo_trainer.decisions import Decide
from bamboo_trainer.loggers import MakeLogger
from bamboo_trainer.tasks.running_buffers import current
from bamboo_trainer.tasks.task_errors import TaskError

Sum = tuple[float, float]  # a sum and its weight
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A sum over a batch, and its weight, such as the number of tokens or samples in the sum; for losses and metrics.

    If the loss returns this, a step's loss, apart from `add_loss`, is the sum of totals divided by the sum of weights.

    total: a scalar tensor; a metric's may be a number. weight: finite, at least 0.
    """

    total: Tensor
    weight: float | Tensor


def add_loss(value: Tensor, name: str = "added") -> None:
    """Add a layer's auxiliary loss, such as one that balances experts, to the task's loss. Call it in the layer's
    forward.

    A step's loss includes the mean of these values over its microbatches, weighted like a `Weighted` loss. The means of
    values with the same name are added up and reported as `name`, unless a metric has this name. Outside a step's
    forward, the call only checks the value. Raises TaskError for an invalid value or, in a step's forward, name.

    value: a scalar tensor, multiplied by its coefficient already. name: an identifier of up to 64 ASCII characters.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise TaskError("add_loss: the value must be a scalar tensor of floats")
    capture = current()
    if capture is not None:
        capture.add_loss(checked_name(name, "add_loss: the name"), value.reshape(()))


def checked_name(name: object, what: str) -> str:
    """Return the name of a metric or added loss. Raises TaskError if it is invalid. what: the message's first words."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TaskError(f"{what} must be up to 64 letters, digits and underscores, got {name!r}")
    return name


def parted(given: Any, what: str) -> tuple[Any, float | None]:
    """Return the total and the weight of a loss or metric; the weight of a mean is None. Raises TaskError for an
    invalid weight. what: the first words of the error message.
    """
    if not isinstance(given, Weighted):
        return given, None
    weight = given.weight
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise TaskError(f"{what}: the weight must be a number, got a tensor {list(weight.shape)}")
        if hasattr(weight, "fake_mode"):
            return given.total, 1.0  # a tensor without data: the layer is only inspected, and no weight is used
        weight = weight.detach().item()
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise TaskError(f"{what}: the weight must be a finite number of at least 0, got {weight!r}")
    return given.total, float(weight)


def sum_and_weight(name: str, value: object, samples: int) -> Sum:
    """Return the sum and weight of a metric's result for a batch. value: `Weighted`, a pair (sum, weight), or a mean,
    which gets the weight `samples`. Raises TaskError for any other value.
    """
    if isinstance(value, tuple) and len(value) == 2:
        value = Weighted(*value)
    if isinstance(value, Weighted):
        total, weight = parted(value, f"the metric {name!r}")
        return _number(name, total), weight or 0.0
    return _number(name, value) * samples, float(samples)


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex():
        return float(value.detach())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    returned = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TaskError(
        f"the metric {name!r} returned {returned}, expected one number (a mean over the batch's samples), "
        "or two: a sum and its weight"
    )


__all__ = [
    "Build",
    "Dataset",
    "Parts",
    "Task",
    "TrainingFacts",
    "Weighted",
    "add_loss",
]

Parts = tuple[torch.Tensor, ...]  # the tensors that layers pass on: one or several


class Dataset(Protocol):
    """Samples by number. The same number must always give the same sample. In training, each whole pass (epoch) visits
    each sample once, in a new order.

    A background thread may call `batch`, unless the first batch draws from torch's global generator. A dataset must
    draw from it for every batch or never. Two threads never call `batch` at once for training or evaluation.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Return the first layer's inputs and the loss's targets for these samples, stacked along dimension 0."""
        ...


Metric = Callable[[Any, Parts], Any]  # of outputs and targets, as the loss gets them


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measurements of `training.evaluation`, in addition to the loss. dataset: its samples are taken in their
    order, in batches of `training.microBatchSize` samples; the last batch may be smaller.

    metrics: by name, functions of (outputs of the last layer, targets). Each returns a number, the mean over the
    samples of the batch, or a sum and its weight.
    """

    dataset: Dataset
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model as a list of layer factories, with its data, loss and optimizer.

    layers: each factory builds one layer, if possible a new one at each call. A layer takes and returns one tensor or
      a tuple of tensors (unpacked if its forward takes several arguments), and must not write to its inputs.
    loss: (outputs of the last layer, targets) -> scalar, the mean over the samples of the microbatch; or `Weighted`.
    metrics: further numbers to report for each step, by name; functions like `loss`, without gradients.
    optimizer: builds a torch optimizer over (name, parameter) pairs, such as one stage's. A group may be empty on some
      stage, which torch accepts only if the groups hold parameters, not pairs.
    learning_rate: a pure function from the number of steps done to the rate, finite and not negative. A parameter
      group's rate is this times the "lr" it was built with divided by `optimizer.defaults["lr"]`.
    schedules: other numbers of the optimizer's parameter groups that change from step to step, such as "momentum",
      "weight_decay" or "betas" (a tuple): pure functions of the steps done. A group's number is
      this times the one it was built with divided by the optimizer's default, as for the rate; tuples are not scaled.
    decisions: by name, functions that end training, change the rate or freeze parameters (`bamboo_trainer.decisions`).
    tied: groups of parameters that share one value: names as "<layer index>.<parameter name>".
    checkpointed: numbers of layers with activation checkpointing: they keep only inputs and run again in the backward.
    costs: the cost of each layer, in any unit; by default, Bamboo counts the layer's operations.
    evaluation: measurements of the model from time to time (`training.evaluation`).
    tokens_per_sample: tokens in each sample, for `training.tokens` and rates; by default the dataset's attribute.
    callbacks: by name, functions that each make a callback, such as its class (`bamboo_trainer.callbacks`).
    loggers: by name, functions that each make a logger (`bamboo_trainer.loggers`).
    """

    layers: Sequence[Callable[[], nn.Module]]
    loss: Callable[[Parts, Parts], torch.Tensor | Weighted]
    dataset: Dataset
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    learning_rate: Callable[[int], float]
    schedules: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    tied: Sequence[tuple[str, ...]] = ()
    checkpointed: Collection[int] = ()
    costs: Sequence[float] | None = None
    evaluation: Evaluation | None = None
    tokens_per_sample: int | None = None
    loggers: Mapping[str, MakeLogger] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[Parts, Parts], torch.Tensor | float | Weighted]] = field(default_factory=dict)
    decisions: Mapping[str, Decide] = field(default_factory=dict)
    callbacks: Mapping[str, MakeCallback] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """The job's training settings (`spec.training` in docs/api.md), for a `build` that takes them as its second
    argument. steps: of the whole job; None if the manifest gives epochs or tokens, which `steps_with` turns into steps.

    global_batch_size, micro_batch_size: in samples.
    """

    steps: int | None
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0
    precision: str = "fp32"
    parameter_precision: str = "fp32"
    epochs: int | None = None
    tokens: int | None = None

    def steps_with(self, dataset: Dataset, tokens_per_sample: int | None = None) -> int:
        """Return the number of the job's steps with that dataset, rounded up to whole steps.

        Raises ValueError if the job's length is given in tokens, but `tokens_per_sample` is None.
        """
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return -(-self.epochs * len(dataset) // self.global_batch_size)
        if tokens_per_sample is None or self.tokens is None:
            raise ValueError("training.tokens: tokens_per_sample must be given")
        return -(-self.tokens // (tokens_per_sample * self.global_batch_size))

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step, over all pipelines."""
        return self.global_batch_size // self.micro_batch_size


Build = Callable[[Mapping[str, Any]], Task] | Callable[[Mapping[str, Any], TrainingFacts], Task]
