"""Count of the operations that a GPU would run for each layer's forward and backward, without a GPU, for `bamboo
profile --device`.

`bamboo_trainer.tasks.inspection.costs` adds up one number by which layers are compared. Here each operation is kept
with its products and its bytes, since how long it takes depends on the device.
"""

from collections import Counter
from functools import partial
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from msgspec.structs import asdict
from torch.overrides import TorchFunctionMode

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_trainer.check import found_or_problem
from bamboo_trainer.loading import settled_task
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.memory.recomputation import checkpointed_layers
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection.costs import GRADIENT_TRAFFIC, layer_costs
from bamboo_trainer.tasks.inspection.operations import Kernel, Operations
from bamboo_trainer.tasks.inspection.walk import Walk, first_batch, forward, look
from bamboo_trainer.tasks.mixed_precision import REDUCED, as_passed_on, autocast, rounded
from bamboo_trainer.tasks.user_code import run_layer, task_loss
from bamboo_trainer.training import TrainingConfig

Row = tuple[str, int, int, int]  # a Kernel, and how often it is run


class LayerWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a layer for one microbatch. The last layer includes the loss; a backward adds the gradients up, and
    repeats the forward of a layer that keeps only its inputs.
    """

    forward: tuple[Row, ...]
    backward: tuple[Row, ...]


def count(manifest: dict[str, Any]) -> dict[str, Any]:
    """Count what the layers of a manifest's task compute and move. The answer has `problem`, one sentence, or `layers`:
    of each its work, bytes and cost, as `bamboo.profiles.analytic.LayerCount` has them.
    """
    torch.set_num_threads(1)  # as in a worker
    spec = parse_manifest(manifest)
    return found_or_problem(lambda: {"layers": _layers(spec)}, (MemoryError, OSError, RuntimeError))


def _layers(spec: JobSpec) -> list[dict[str, Any]]:
    task, spec = settled_task(spec)
    sizes, costs = measure(task, spec), layer_costs(task, spec.training.micro_batch_size)
    return [
        {**asdict(work), **asdict(size.bytes), "cost": cost}
        for work, size, cost in zip(layer_work(task, spec), sizes, costs, strict=True)
    ]


def layer_work(task: Task, spec: JobSpec) -> tuple[LayerWork, ...]:
    """Return the work of every layer, with the job's microbatch and precision. Raises TaskError for a layer
    that fails.
    """
    inputs, targets = first_batch(task, spec.training.micro_batch_size)
    return look(task, inputs, partial(_work, TrainingConfig.of(spec.training), targets))


def _work(config: TrainingConfig, targets: Parts, walk: Walk, index: int, inputs: Parts) -> tuple[LayerWork, Parts]:
    task, layer = walk.task, rounded(walk.layer(index), config.parameter_dtype)
    forwards, backward = Operations(), Operations()
    with walk.within:
        given = as_passed_on(inputs)
        with walk.quickly, FusedOperations(), autocast(torch.device("cpu"), config.precision):
            if config.precision in REDUCED:  # parameters are cast once a step, and not for each microbatch
                run_layer(layer, index, given)
            with forwards:
                parts = forward(task, config, index, layer, given)
        ends = [p for p in parts if p.requires_grad]
        if index == len(task.layers) - 1:
            with walk.quickly, FusedOperations(), forwards:
                ends = [loss for loss in [task_loss(task, parts, walk.given(targets)).total] if loss.requires_grad]
        with backward:
            if ends:
                torch.autograd.backward(ends, [torch.empty_like(p) for p in ends])
    backwards = backward.kernels + (forwards.kernels if index in checkpointed_layers(task) and ends else Counter())
    if trained := sum(p.numel() for p in layer.parameters() if p.requires_grad):
        backwards[Kernel("fp32", 0, GRADIENT_TRAFFIC * trained)] += 1
    return LayerWork(forward=_rows(forwards.kernels), backward=_rows(backwards)), parts


def _rows(kernels: Counter[Kernel]) -> tuple[Row, ...]:
    return tuple((*kernel, times) for kernel, times in sorted(kernels.items()))


class FusedOperations(TorchFunctionMode):
    """Replaces operations that are one on a GPU and several on a CPU by one: attention, with any mask and dropout, and
    dropout. The outputs have the same form.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | given
            grouped: dict[str, Any] = {"enable_gqa": True} if named.get("enable_gqa") else {}
            return func(named["query"], named["key"], named["value"], **grouped)
        if func in (F.dropout, torch.dropout):
            named = dict(zip(("input", "p", "training"), args, strict=False)) | given
            rate, trains = named.get("p", 0.5), named.get("training", named.get("train", True))
            if rate and trains and not named.get("inplace") and named["input"].is_floating_point():
                return torch.native_dropout(named["input"], rate, True)[0]
        return func(*args, **given)
