"""Construction of a task from a plain torch.nn.Module: `from_module`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.split.layers import Call
from bamboo_trainer.split.module import Read, SplitModule
from bamboo_trainer.split.structures import Form, put_together
from bamboo_trainer.task import Dataset, Evaluation, Parts, Task
from bamboo_trainer.tasks.user_code import check_dataset

EXAMPLE = 2  # samples whose shapes the model is recorded with


def from_module(
    make: Callable[[], nn.Module],
    *,
    loss: Callable[[Any, Parts], Any],
    dataset: Dataset,
    blocks: str | Sequence[str] | None = None,
    inputs: Sequence[str] = (),
    call: Call | None = None,
    read: Read | None = None,
    checkpoint: bool = False,
    **task: Any,
) -> Task:
    """Return the task of a model whose blocks become layers.

    make: builds the whole model, without computing values. A model in eval mode is put into training mode; parts in
      eval mode of one in training mode stay so.
    loss: (outputs, targets) -> scalar, as in `Task`: both are tuples of tensors. If the model returns anything but a
      tensor or a tuple, such as a dictionary, outputs is what the model returns.
    blocks: the name of the ModuleList, ModuleDict or Sequential whose modules become layers, or the names of several
      that the forward runs one after the other. Not needed for a Sequential, or where there is one ModuleList.
    inputs: the names of the forward's arguments that get the dataset's inputs; by default in order.
    call: (model, inputs) -> its result, for a model that is not simply called with its inputs.
    read: first values from elsewhere, for one layer at a time: names and forms -> the available values.
    checkpoint: blocks keep only their inputs for the backward.
    task: the other fields of `Task`: optimizer, learning_rate (a function, or a number) and so on. `metrics`, and ones
      of `evaluation`, are called with the arguments of the loss.

    Raises ValueError if the model cannot be split, in a sentence with the reason.
    """
    split = SplitModule(make, blocks, example_of(dataset), call or (_call(inputs) if inputs else None), read)
    return task_of(split, loss=loss, dataset=dataset, checkpoint=checkpoint, **task)


def task_of(
    split: SplitModule, *, loss: Callable[[Any, Parts], Any], dataset: Dataset, checkpoint: bool = False, **task: Any
) -> Task:
    """Return the task of a module that is split already; see `from_module`."""
    rate = task.pop("learning_rate", None)
    if isinstance(rate, int | float):
        task["learning_rate"] = partial(_constant, float(rate))
    elif rate is not None:
        task["learning_rate"] = rate
    form = split.route.base.result
    if "metrics" in task:
        task["metrics"] = _metrics(task["metrics"], form)
    if isinstance(task.get("evaluation"), Evaluation):
        measured: Evaluation = task["evaluation"]
        task["evaluation"] = replace(measured, metrics=_metrics(measured.metrics, form))
    return Task(
        layers=split.layers,
        loss=partial(_as_returned, loss, form),
        dataset=dataset,
        tied=split.tied,
        checkpointed=split.block_layers if checkpoint else (),
        **task,
    )


def example_of(dataset: Dataset) -> Parts:
    """Return inputs of a few samples. Raises TaskError if it is no dataset."""
    check_dataset(dataset)
    with torch.random.fork_rng(devices=[]):
        given, _ = dataset.batch([n % len(dataset) for n in range(EXAMPLE)])
    return given


def _call(names: Sequence[str]) -> Call:
    return partial(_by_name, tuple(names))


def _by_name(names: Sequence[str], model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return model(**dict(zip(names, inputs, strict=True)))


def _metrics(metrics: Any, form: Form) -> Any:
    """Return metrics that are called like the loss. Invalid ones stay, for the task's checks to name."""
    if not isinstance(metrics, Mapping):
        return metrics
    return {
        name: partial(_as_returned, metric, form) if callable(metric) else metric for name, metric in metrics.items()
    }


def _as_returned(function: Callable[[Any, Parts], Any], form: Form, outputs: Parts, targets: Parts) -> Any:
    """Call a loss or a metric with what the model returned; a single tensor becomes a tuple, as in a `Task`."""
    returned = put_together(form, outputs)
    return function((returned,) if isinstance(returned, Tensor) else returned, targets)


def _constant(rate: float, _step: int) -> float:
    return rate
