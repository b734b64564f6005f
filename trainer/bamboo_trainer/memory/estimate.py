"""Estimates of a job's memory before training.

Each layer's forward runs, on tensors without data if possible (see `inspection`), and the sizes of the tensors that
autograd would keep are added up.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bamboo_core.job.spec import JobSpec, in_force
from bamboo_core.planning.gradient_groups import most_microbatches, sums_finished
from bamboo_core.planning.grid import Roles, worker_roles
from bamboo_core.planning.profile import LayerBytes
from bamboo_core.planning.splits.device_stages import device_roles
from bamboo_core.planning.steps.worker_memory import StageBytes, device_peak, stage_bytes
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection import Walk, first_batch, forward, look, require_all_samples
from bamboo_trainer.tasks.mixed_precision import CAST, rounded
from bamboo_trainer.tasks.operations import RecurrentRefused
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tied_groups
from bamboo_trainer.tasks.user_code import task_loss
from bamboo_trainer.training import TrainingConfig


def checkpointed_layers(task: Task) -> frozenset[int]:
    """Return the layers that the task marks for activation checkpointing. Raises TaskError for an invalid mark."""
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
    """Wrap a layer's call in activation checkpointing: the backward repeats the call.

    The call must seed the generators itself, since their states are not kept for the repetition.
    """

    def checkpointed(given: Tensor | tuple[Tensor, ...]) -> Any:
        single = isinstance(given, Tensor)

        def again(*parts: Tensor) -> Any:
            return call(parts[0] if single else parts)

        parts = (given,) if isinstance(given, Tensor) else given
        return checkpoint(again, *parts, use_reentrant=False, preserve_rng_state=False)

    return checkpointed


KEPT_STEPS = 2  # steps of frames in the message log
ADAM = 2  # assumed tensors per parameter of an optimizer whose step needs values


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """The size of a layer. parameters: number of elements. tied: number of these in parameters that are not the first
    of their tied group. casts: bytes of autocast's copies of parameters, shared by all microbatches; 0 if the task has
    checkpointed layers. inputs: bytes per microbatch.
    """

    parameters: int
    tied: int
    bytes: LayerBytes
    casts: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByKind:
    """The memory of a device at its peak, and the host memory for it, in bytes."""

    # parameters, optimizer: of the stages that the worker runs, with frozen values, buffers and autocast's copies
    parameters: int
    optimizer: int
    replica: int  # the same of its replicas
    gradients: int  # partial sums, and final gradients not yet applied
    log: int  # in host memory: frames that may be sent again, and sums of finished groups, also of the next stage
    activations: int  # tensors for the backwards of the microbatches in flight
    copies: int  # in host memory: of layers for checkpoints, and optimizers' states that are on no device

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def measure(task: Task, spec: JobSpec) -> tuple[LayerSize, ...]:
    """Return each layer's size. Raises TaskError for unusable data, layers, losses or optimizers; TaskOutOfMemory."""
    inputs, targets = first_batch(task, spec.training.micro_batch_size)
    return look(task, inputs, partial(_size, TrainingConfig.of(spec.training), targets))


def _size(config: TrainingConfig, targets: Parts, walk: Walk, index: int, inputs: Parts) -> tuple[LayerSize, Parts]:
    task, is_last, checkpointed = walk.task, index == len(walk.task.layers) - 1, checkpointed_layers(walk.task)
    again = {name for name, (_, first) in tied_groups(task).items() if name != first}
    layer = rounded(walk.layer(index), config.parameter_dtype)
    own = {t.untyped_storage()._cdata for t in (*layer.parameters(), *layer.buffers())}
    with walk.within:
        kept = _Saved(own)
        with saved_tensors_hooks(kept.add, lambda tensor: tensor):
            with RecurrentRefused() if walk.mode else nullcontext():
                parts = forward(task, config, index, layer, inputs)
            if is_last:
                task_loss(task, parts, walk.given(targets))
        passed = () if is_last else parts
        boundary = {p.untyped_storage()._cdata for p in (*inputs, *passed)}
        remembered = _optimizer_bytes(task, index, layer)
    if is_last:
        require_all_samples(task, parts, targets)
    size = LayerSize(
        parameters=sum(p.numel() for p in layer.parameters()),
        tied=sum(p.numel() for name, p in layer.named_parameters() if f"{index}.{name}" in again),
        bytes=LayerBytes(
            parameters=sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())),
            optimizer=remembered,
            gradients=sum(4 * p.numel() for p in layer.parameters() if p.requires_grad),
            activations=0 if index in checkpointed else kept.bytes(boundary) + bool(checkpointed) * kept.cast_bytes(),
            boundary=sum(p.nbytes for p in passed),
        ),
        casts=0 if checkpointed else kept.cast_bytes(),  # recomputation drops the casts of all layers
        inputs=sum(p.nbytes for p in inputs),
    )
    return size, parts


class _Saved:
    """The storages that autograd keeps, each counted once. own: storages of parameters and buffers, not counted."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._tensors: dict[int, Tensor] = {}  # kept alive, since a freed storage's number is used again
        self._casts: dict[int, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves (a saved-tensors hook), unless it is in `own`; return it detached."""
        number = tensor.untyped_storage()._cdata
        if number not in self._own:
            self._tensors[number] = tensor
            if self._is_cast(tensor):
                self._casts[number] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    def _is_cast(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a trained parameter cast to another dtype, or a view of such a cast."""
        whole = tensor if tensor._base is None else tensor._base
        made_by = whole.grad_fn
        if made_by is None or made_by.name() != CAST:
            return False
        source = getattr(made_by.next_functions[0][0], "variable", None)
        return source is not None and source.untyped_storage()._cdata in self._own

    def bytes(self, boundary: set[int]) -> int:
        counted = self._tensors.keys() - boundary - self._casts.keys()
        return sum(self._tensors[number].untyped_storage().nbytes() for number in counted)

    def cast_bytes(self) -> int:
        return sum(self._casts.values())


def _optimizer_bytes(task: Task, index: int, layer: nn.Module) -> int:
    """Return the bytes of a layer's optimizer state after a step; Adam's are assumed if a step without data fails."""
    trained = {f"{index}.{n}": nn.Parameter(p.to("meta")) for n, p in layer.named_parameters() if p.requires_grad}
    inner = ScheduledOptimizer(task, list(trained.items())).inner
    if inner is None:
        return 0
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in inner.param_groups:
        if group.get("fused"):
            group["fused"] = False  # the state is the same, but fused kernels need values
    with suppress(Exception):  # an optimizer that reads values, such as Adafactor
        inner.step()
        remembered = [t for state in inner.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in remembered)
    return ADAM * sum(p.nbytes for p in trained.values())


def worker_memory(
    sizes: Sequence[LayerSize],
    stages: Sequence[tuple[int, int]],
    spec: JobSpec,
    *,
    taken_over: bool,
    parts: Sequence[tuple[int, int]] = (),
) -> tuple[int | None, MemoryByKind]:
    """Return the stage whose worker needs the most memory, and that worker's memory.

    taken_over: workers also run cells of lost workers. parts: the layers of each device stage, if workers have several
    devices; the comparison and the result are then for one device, with the host memory for it.
    """
    spec, devices = in_force(spec), spec.worker.devices
    accounts = [
        (one.stage, _account(sizes, parts or stages, spec, device_roles(one, number, devices)))
        for one in worker_roles(spec, len(stages), taken_over=taken_over)
        for number in range(devices)
    ]
    return max(accounts, key=lambda account: account[1].total)


def _account(
    sizes: Sequence[LayerSize], stages: Sequence[tuple[int, int]], spec: JobSpec, roles: Roles
) -> MemoryByKind:
    """Return the memory of a worker's device at its peak. roles: the stages that it runs and replicates."""
    depth, pipelines = len(stages), spec.topology.pipelines
    owned, kept = roles.owned, roles.kept
    microbatches = most_microbatches(spec.training, pipelines)

    def total(of: Callable[[LayerBytes], int], *which: int) -> int:
        return sum(of(size.bytes) for s in which for size in sizes[slice(*stages[s])])

    def stage(s: int) -> StageBytes:
        own = sizes[slice(*stages[s])]
        casts = sum(size.casts for size in own)
        return stage_bytes(spec, (s, depth), [size.bytes for size in own], inputs=own[0].inputs, casts=casts)

    def logged(s: int) -> int:
        first, end = stages[s]
        boundary = sizes[end - 1].bytes.boundary + (sizes[first].inputs if s else 0)
        chunks = 1 + max(map(len, sums_finished(spec.training.groups, pipelines)))  # of its sums, and of the result
        shared = total(lambda layer: layer.gradients, s) * chunks * (pipelines - 1) // pipelines
        return KEPT_STEPS * (microbatches * boundary + shared)

    def finished_sums() -> int:
        """Return the bytes of finished groups' sums: of cells that run here and, with one device, the next stage."""
        groups = -(-spec.training.groups // pipelines)
        next_one = () if spec.worker.devices > 1 or roles.stage is None or depth == 1 else ((roles.stage + 1) % depth,)
        return (groups - 1).bit_length() * total(lambda layer: layer.gradients, *owned, *next_one)

    peak = device_peak(spec, roles, stage)
    states = total(lambda layer: layer.optimizer, *roles.states) + total(_state, *kept)
    return MemoryByKind(
        parameters=peak.parameters,
        optimizer=peak.optimizer,
        replica=peak.replica,
        gradients=peak.gradients,
        log=sum(map(logged, owned)) + finished_sums(),
        activations=peak.activations,
        copies=_copies(sizes, stages, spec, (roles.states, kept)) + max(0, states - peak.optimizer - peak.replica),
    )


def _state(layer: LayerBytes) -> int:
    return layer.parameters + layer.optimizer


def _copies(
    sizes: Sequence[LayerSize],
    stages: Sequence[tuple[int, int]],
    spec: JobSpec,
    held: tuple[Sequence[int], Sequence[int]],
) -> int:
    """Estimate the bytes of two checkpoints' copies on a worker; 0 without checkpoints. held: stages that it runs, and
    stages that it replicates. A stage's layers are dealt in turn to its owners in all pipelines and to its replicas.
    """
    if spec.checkpoint is None:
        return 0
    replicas, owners = min(spec.redundancy.kept, len(stages) - 1), spec.topology.pipelines

    def share(stage: int, place: int) -> int:
        dealt = sizes[slice(*stages[stage])][place :: owners * (1 + replicas)]
        return sum(_state(size.bytes) for size in dealt)

    return 2 * (sum(share(s, 0) for s in held[0]) + sum(share(s, owners) for s in held[1]))
