"""What a GPU would have to run for each layer: the operations of a forward and of a backward, counted without a GPU.

Layers are run on tensors that have a form and no data, in a child process; if one cannot be run so, all are run for
real, on the CPU. `bamboo_trainer.tasks.inspection.costs` adds up one number by which layers are compared. Here each
operation is kept with its products and its bytes, since how long it takes depends on the device.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from bamboo_core.job.spec import JobSpec
from bamboo_core.job.training_spec import Precision
from bamboo_trainer.memory.estimate import rounded
from bamboo_trainer.memory.recomputation import checkpointed_layers
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.child import lines_of_child
from bamboo_trainer.tasks.inspection.costs import GRADIENT_TRAFFIC, layer_without_values
from bamboo_trainer.tasks.inspection.no_values import failing_quietly
from bamboo_trainer.tasks.inspection.operations import AllStepsAtOnce, Kernel, Operations
from bamboo_trainer.tasks.mixed_precision import as_passed_on, autocast, passed_on
from bamboo_trainer.tasks.user_code import build_layer, load_batch, run_layer, task_loss
from bamboo_trainer.training import TrainingConfig

logger = logging.getLogger(__name__)

Row = tuple[str, int, int, int]  # a Kernel, and how often it is run


class LayerWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a layer for one microbatch. The last layer has the loss; a backward adds the gradients up, and
    repeats the forward of a layer that keeps nothing but its inputs.
    """

    forward: tuple[Row, ...]
    backward: tuple[Row, ...]


def layer_work(task: Task, spec: JobSpec) -> tuple[LayerWork, ...]:
    """The work of every layer, with the job's microbatch and precision. Raises TaskError for a layer that cannot be
    run.
    """
    length = len(task.dataset)
    batch = load_batch(task, [i % length for i in range(spec.training.micro_batch_size)])
    counted, problem = lines_of_child(msgspec.json.encode(one).decode() for one in _without_data(task, spec, batch))
    if not problem:
        return tuple(msgspec.json.decode(line, type=LayerWork) for line in counted)
    logger.info("the layers are run with data, since %s", problem)
    with torch.random.fork_rng(devices=[]):
        return tuple(_walk(task, spec, partial(build_layer, task, 0), batch, nullcontext, nullcontext))


def _without_data(task: Task, spec: JobSpec, batch: tuple[Parts, Parts]) -> Iterator[LayerWork]:
    """Raises whatever a layer raises because there are no data, or anyway."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs, targets = (tuple(cast(Tensor, mode.from_tensor(p.detach())) for p in parts) for parts in batch)
    with failing_quietly():
        build = partial(layer_without_values, task, mode=mode)
        yield from _walk(task, spec, build, (inputs, targets), lambda: mode, AllStepsAtOnce)


def _walk(
    task: Task,
    spec: JobSpec,
    build: Callable[[int], nn.Module],
    batch: tuple[Parts, Parts],
    within: Callable[[], AbstractContextManager[object]],
    quickly: Callable[[], AbstractContextManager[object]],
) -> Iterator[LayerWork]:
    """One layer after the other, each on the outputs of the one before. within: entered around each layer. quickly:
    around what is run of it.
    """
    config, precision, last = TrainingConfig.of(spec.training), spec.training.precision, len(task.layers) - 1
    checkpointed, parts = checkpointed_layers(task), batch[0]
    needed = [False for _ in parts]
    for index in range(last + 1):
        layer, forward = rounded(build(index), config.parameter_dtype), Operations()
        with within():
            leaves = tuple(p.detach().requires_grad_(need) for p, need in zip(parts, needed, strict=True))
            given = as_passed_on(leaves)
            with quickly(), FusedOperations(), autocast(torch.device("cpu"), precision):
                if precision != Precision.FP32:  # parameters are cast once a step, and not for each microbatch
                    run_layer(layer, index, given)
                with forward:
                    parts = run_layer(layer, index, given)
            with quickly(), FusedOperations(), forward:
                if index < last:
                    parts = passed_on(parts, config.boundary_dtype)
                    ends = [p for p in parts if p.requires_grad]
                else:
                    ends = [loss for loss in [task_loss(task, parts, batch[1]).total] if loss.requires_grad]
            with Operations() as backward:
                if ends:
                    torch.autograd.backward(ends, [torch.empty_like(p) for p in ends])
        backwards = backward.kernels + (forward.kernels if index in checkpointed and ends else Counter())
        if trained := sum(p.numel() for p in layer.parameters() if p.requires_grad):
            backwards[Kernel("fp32", 0, GRADIENT_TRAFFIC * trained)] += 1
        yield LayerWork(forward=_rows(forward.kernels), backward=_rows(backwards))
        needed = [p.requires_grad for p in parts]
        parts = tuple(p.detach() for p in parts)


def _rows(kernels: Counter[Kernel]) -> tuple[Row, ...]:
    return tuple((*kernel, times) for kernel, times in sorted(kernels.items()))


class FusedOperations(TorchFunctionMode):
    """What is one operation on a GPU and several on a CPU, as one: attention, whatever its mask and dropout, and
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
