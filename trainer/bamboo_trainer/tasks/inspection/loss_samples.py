"""A check that a task's loss counts all samples of a microbatch, not only the first or the last."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.losses import Weighted
from bamboo_trainer.tasks.task_errors import TaskError

SAMPLES: Final = 2
DRAWS: Final = 3  # compared draws of made-up outputs, for each order of the samples
MOST_VALUES: Final = 1 << 24  # in the outputs for two samples: the loss of larger ones would take too long


def require_all_samples(task: Task, forms: Parts, targets: Parts) -> None:
    """Raise TaskError if the loss depends only on the first or the last sample of a microbatch.

    The loss is computed from made-up outputs for two samples, in both orders of their targets. It is refused if it
    always follows one sample's outputs and never the other's. A loss that cannot be tried is accepted.

    forms: tensors with the shapes and dtypes of the last layer's outputs; their values are not used.
    """
    samples = min((len(part) for part in (*forms, *targets) if part.dim()), default=0)
    rows = all(part.dim() and len(part) == samples for part in (*forms, *targets))
    if samples < SAMPLES or not rows or sum(part[:SAMPLES].numel() for part in forms) > MOST_VALUES:
        return
    followed: set[str | None] = {None}
    with suppress(Exception), torch.no_grad():  # the loss may not accept made-up outputs
        followed = {_followed_alone(task, *made) for made in _made(forms, targets)}
    if None not in followed and len(followed) == 1:
        raise TaskError(
            f"the loss depends on the {followed.pop()} sample of a microbatch alone: expected the mean over all "
            "samples (outputs and targets are tuples of tensors; outputs[0] has all samples, outputs[0][0] only one)"
        )


def _made(forms: Parts, targets: Parts) -> Iterator[tuple[Parts, Parts, Parts]]:
    """Yield outputs, other outputs, and targets, each for two samples."""
    draw = torch.Generator().manual_seed(0)

    def outputs() -> Parts:
        drawn = [torch.randn((SAMPLES, *part.shape[1:]), generator=draw) for part in forms]
        return tuple(d if p.is_floating_point() else d.to(p.dtype) for d, p in zip(drawn, forms, strict=True))

    for order in ([0, 1], [1, 0]):
        for _ in range(DRAWS):
            yield outputs(), outputs(), tuple(part[order] for part in targets)


def _followed_alone(task: Task, outputs: Parts, others: Parts, targets: Parts) -> str | None:
    """Return "first" or "last" if the loss follows the outputs of only that sample, else None."""
    value = _total(task, outputs, targets)
    without_last = tuple(torch.cat([a[:1], b[1:]]) for a, b in zip(outputs, others, strict=True))
    without_first = tuple(torch.cat([b[:1], a[1:]]) for a, b in zip(outputs, others, strict=True))
    changes = [not torch.equal(value, _total(task, made, targets)) for made in (without_first, without_last)]
    return {(True, False): "first", (False, True): "last"}.get((changes[0], changes[1]))


def _total(task: Task, outputs: Parts, targets: Parts) -> Tensor:
    given = task.loss(outputs, targets)
    return given.total if isinstance(given, Weighted) else given
