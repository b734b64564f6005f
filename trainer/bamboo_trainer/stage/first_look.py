"""Checks around a stage's first forward: whether another worker can repeat it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bamboo_trainer.stage.forwarding import Forwarding
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.capture import Capture
from bamboo_trainer.tasks.inspection.determinism import Call, DeterminismCheck, compare_batches
from bamboo_trainer.tasks.mixed_precision import forget_casts
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import HAVE_IT, stranger
from bamboo_trainer.tasks.user_code import forward_seed, no_new_parameters, task_loss, unchanged_buffers
from bamboo_trainer.training import TrainingConfig


class FirstLook:
    """Checks one stage. first: makes the task with the initial values. shared: ids of its tied parameters. last: this
    is the last stage.
    """

    def __init__(
        self,
        first: Callable[[], Task],
        config: TrainingConfig,
        layers: Mapping[int, nn.Module],
        parameters: FlatParameters,
        shared: frozenset[int],
        last: bool,
    ) -> None:
        self._first, self._config = first, config
        self._layers, self._parameters, self._shared, self._last = layers, parameters, shared, last

    def before(
        self, reader: BatchReader, place: tuple[int, int, int], inputs: Parts | None, device: torch.device, call: Call
    ) -> None:
        """Before the first forward of all, check that the task is deterministic. Raises NotDeterministic.

        place: stage, step and microbatch. inputs: None on the first stage. call: runs a layer as the forward does.
        """
        stage, step, microbatch = place
        task, loss = self._first(), None
        if inputs is None or self._last:
            (given, targets), again = reader.twice(stage, step, microbatch)
            compare_batches((given, targets), again, self._config.samples(step, microbatch, task.dataset))
            inputs = given if inputs is None else inputs
            on_device = tuple(p.to(device) for p in targets)
            loss = (lambda outputs: _measured(task, outputs, on_device)) if self._last else None

        def run(index: int, one: Any, capture: Capture) -> Any:
            return call(index, forward_seed(self._config.seed, step, microbatch, index), one, capture)

        with reader.quiet():
            looked = DeterminismCheck(task, self._config.seed, dict(self._layers), self._shared, run, loss)
            looked.check(tuple(p.to(device) for p in inputs))
        forget_casts()

    def during(self, run: Callable[[], Forwarding]) -> Forwarding:
        """Run the first forward. Raises TaskError if it changes buffers, or uses parameters of other layers."""
        with no_new_parameters(self._layers), unchanged_buffers(self._layers):
            forwarding = run()
        ends = (*forwarding.parts, *(value for _, value in forwarding.capture.losses))
        foreign = stranger(ends, self._parameters.trained())
        if foreign is not None:
            first, end = min(self._layers), max(self._layers)
            raise TaskError(
                f"layers {first} to {end}{' or the loss' if self._last else ''} use a parameter "
                f"{list(foreign.shape)} that none of these layers has (Module.named_parameters), so it would not be "
                f"trained with it: {HAVE_IT}"
            )
        return forwarding


def _measured(task: Task, outputs: Parts, targets: Parts) -> Parts:
    loss = task_loss(task, outputs, targets)
    return (loss.total,) if loss.weight is None else (loss.total, torch.tensor(loss.weight, dtype=torch.float64))
