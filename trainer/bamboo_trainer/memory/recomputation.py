"""Recomputation: layers that keep only their inputs for the backward, and run again in it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError


def checkpointed_layers(task: Task) -> frozenset[int]:
    """Return the layers that the task marks for recomputation. Raises TaskError for a wrong number."""
    expected = f"task.checkpointed must be a collection of layer numbers from 0 to {len(task.layers) - 1}"
    try:
        marked = list(task.checkpointed)
    except TypeError:
        raise TaskError(f"{expected}, got {task.checkpointed!r}") from None
    for layer in marked:
        if type(layer) is not int or not 0 <= layer < len(task.layers):
            raise TaskError(f"{expected}, got {layer!r} in it")
    return frozenset(marked)


def recomputing(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a call of a layer that is repeated in the backward, with the same graph and the same bits of gradients.

    The call seeds the generators and enters autocast itself, so no state is kept for the repetition.
    """

    def checkpointed(given: Tensor | tuple[Tensor, ...]) -> Any:
        single = isinstance(given, Tensor)

        def again(*parts: Tensor) -> Any:
            return call(parts[0] if single else parts)

        parts = (given,) if isinstance(given, Tensor) else given
        return checkpoint(again, *parts, use_reentrant=False, preserve_rng_state=False)

    return checkpointed
