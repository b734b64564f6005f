"""A task's losses and metrics: means, or sums with a weight; and losses of single layers."""

import math
import re
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_trainer.tasks.capture import current
from bamboo_trainer.tasks.task_errors import TaskError

Sum = tuple[float, float]  # and its weight
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A sum over a microbatch, and its weight: the number of tokens or samples that it is the sum over.

    A loss of this form is the sum of all totals of the global batch divided by the sum of all weights.

    total: a scalar tensor. weight: at least 0.
    """

    total: Tensor
    weight: float | Tensor


def add_loss(value: Tensor, name: str = "added") -> None:
    """Add a layer's own loss (such as balancing experts) to the task's. Call it in the layer's forward.

    It counts as its mean over the microbatches of the step, with the weights of a `Weighted` loss. It is part of the
    reported loss, and reported under its name, too. Outside of Bamboo nothing happens.

    value: a scalar tensor, multiplied by its coefficient already. name: letters, digits and underscores.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise TaskError("add_loss: the value must be a scalar tensor of floats")
    capture = current()
    if capture is not None:
        capture.add_loss(checked_name(name, "add_loss: the name"), value.reshape(()))


def checked_name(name: object, what: str) -> str:
    """Return the name; raise TaskError if a metric cannot have it. what: begins the message."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TaskError(f"{what} must be up to 64 letters, digits and underscores, got {name!r}")
    return name


def parted(given: Any, what: str) -> tuple[Any, float | None]:
    """Return total and weight; None for a mean. Raises TaskError for an invalid weight. what: begins the message."""
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
    """Return the sum and weight of a metric's result for a batch: `Weighted` or a pair; or a mean, which counts once
    for each sample.
    """
    if isinstance(value, Weighted):
        total, weight = parted(value, f"the metric {name!r}")
        return _number(name, total), weight or 0.0
    if isinstance(value, tuple) and len(value) == 2:
        return _number(name, value[0]), _number(name, value[1])
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
