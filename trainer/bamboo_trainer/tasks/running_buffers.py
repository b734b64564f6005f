"""Buffers that a forward updates, such as BatchNorm's running statistics: each microbatch's contribution is captured.

A stage's forward may be repeated, on another worker, too, so it changes nothing. It captures what it would change: for
BatchNorm the batch's mean and variance, for a layer of the user's the arguments of `contribute`. When the step commits
all microbatches' contributions are applied in their order, as in one process that runs them one after the other.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from bamboo_trainer.frames.tensors import unsendable
from bamboo_trainer.tasks.capture import Capture, Parts, current
from bamboo_trainer.tasks.task_errors import TaskError, in_task

Update = Callable[..., Mapping[str, Tensor]]

_DECLARED: Final = "_bamboo_running_buffers"  # a module's attribute, so that a copy of the module has it, too
_STATISTICS: Final = ("running_mean", "running_var")
_COUNT: Final = "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class _Declared:
    names: tuple[str, ...]
    update: Update


def track_buffers(module: nn.Module, names: Sequence[str], update: Update) -> None:
    """Declare that the module's forward updates these buffers of its own, through `contribute`. Call it in the
    constructor, after `register_buffer`; torch's BatchNorm and InstanceNorm need no declaration.

    update: (the buffers by name, *the tensors of one call of `contribute`) -> their new values by name, of the same
    shapes and types; a pure function. It is called with tensors in host memory for each contribution, in the order of
    the microbatches.
    """
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise TaskError(f"track_buffers: names must be a list of buffers' names, got {names!r}")
    for name in names:
        if not isinstance(module._buffers.get(name), Tensor):
            raise TaskError(
                f"track_buffers: {type(module).__name__} has no buffer {name!r} of its own; call register_buffer first"
            )
    if not callable(update):
        raise TaskError(f"track_buffers: update must be a function, got {type(update).__name__}")
    object.__setattr__(module, _DECLARED, _Declared(tuple(names), update))


def contribute(module: nn.Module, *tensors: Tensor) -> None:
    """Contribute this microbatch's tensors to the buffers that the module has declared (`track_buffers`). Call it in a
    forward.

    The buffers keep their values until the step commits. Nothing happens in eval mode. In plain PyTorch the buffers are
    updated at once.
    """
    declared = _declared(module)
    if declared is None:
        raise TaskError(f"contribute: {type(module).__name__} has declared no buffers (track_buffers)")
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TaskError(f"contribute: expected tensors, got {[type(t).__name__ for t in tensors]}")
    for tensor in tensors:
        if wrong := unsendable(tensor):
            raise TaskError(f"contribute: {type(module).__name__} contributes a tensor of {wrong}")
    if not module.training:
        return
    given = tuple(tensor.detach().clone() for tensor in tensors)
    capture = current()
    if capture is not None:
        capture.contribute(module, given)
    elif module not in _INTERCEPTED:
        apply_at_once(module, given)


def apply_at_once(module: nn.Module, given: Parts) -> None:
    """Apply a contribution to the module's declared buffers."""
    declared = _declared(module)
    assert declared is not None
    buffers = {name: module.get_buffer(name) for name in declared.names}
    with torch.no_grad():
        for name, value in _updated(type(module).__name__, declared, buffers, given).items():
            buffers[name].copy_(value)


def _declared(module: nn.Module) -> _Declared | None:
    found = module.__dict__.get(_DECLARED)
    return found if isinstance(found, _Declared) else None


# contributions of a forward


_INTERCEPTED: Final[WeakSet[nn.Module]] = WeakSet()


def intercept(module: nn.Module) -> None:
    """Make forwards of a module with running buffers leave these unchanged from now on, captured or not."""
    if module in _INTERCEPTED:
        return
    _INTERCEPTED.add(module)
    if _declared(module) is None:
        lent = _LentStatistics()
        module.register_forward_pre_hook(lent.lend)
        module.register_forward_hook(lent.take_back, always_call=True)


class _LentStatistics:
    """Hooks around the forward of a BatchNorm or InstanceNorm, which lend it statistics that become the batch's."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[str, Tensor | None], float | None] | None] = []

    def lend(self, module: nn.Module, _args: object) -> None:
        assert isinstance(module, _BatchNorm | _InstanceNorm)
        if not module.training or not module.track_running_stats:
            self._kept.append(None)
            return
        capture = current() or Capture()
        buffers = module._buffers
        self._kept.append(({name: buffers.get(name) for name in (*_STATISTICS, _COUNT)}, module.momentum))
        for name in _STATISTICS:
            own = buffers[name]
            assert own is not None
            buffers[name] = torch.full_like(own, capture.fill)
        count = buffers.get(_COUNT)
        if count is not None:
            buffers[_COUNT] = torch.full_like(count, capture.count)
        module.momentum = capture.momentum

    def take_back(self, module: nn.Module, _args: object, result: Any) -> None:
        assert isinstance(module, _BatchNorm | _InstanceNorm)
        kept = self._kept.pop() if self._kept else None
        if kept is None:
            return
        given = [module._buffers[name] for name in _STATISTICS]  # momentum times the batch's
        own, module.momentum = kept
        module._buffers.update((name, own[name]) for name in own if name in module._buffers)
        capture = current()
        if capture is not None and result is not None:  # it is None if the forward has raised
            capture.contribute(
                module, tuple(tensor.detach() / capture.momentum for tensor in given if tensor is not None)
            )


@contextmanager
def evaluating(layers: Collection[nn.Module]) -> Iterator[None]:
    """Put layers into eval mode, without contributions; then restore the mode of each of their modules."""
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


# applying contributions


@dataclass(frozen=True, slots=True, eq=False)
class RunningModule:
    """A module with buffers that its forward updates."""

    module: nn.Module
    path: str  # its name in the layer, "" if it is the layer
    names: tuple[str, ...]  # of these buffers, in order

    @property
    def contributes(self) -> bool:
        """Whether its forward contributes: not if in eval mode when the layer is made, like a frozen BatchNorm."""
        return self.module.training

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: self.module.get_buffer(name) for name in self.names}

    @property
    def forms(self) -> list[tuple[torch.dtype, tuple[int, ...]]] | None:
        """The form of each contribution; None if only the module's own update knows."""
        if _declared(self.module) is not None:
            return None
        return [(b.dtype, tuple(b.shape)) for name, b in self.buffers.items() if name in _STATISTICS]

    def place(self, name: str) -> str:
        """Return the buffer's name in the layer."""
        return f"{self.path}.{name}" if self.path else name

    def folded(self, who: str, contributed: Sequence[Parts]) -> dict[str, Tensor]:
        """Return the buffers, in host memory, after these contributions in order. who: names the layer in errors.

        Raises TaskError.
        """
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in self.buffers.items()}
        declared = _declared(self.module)
        with torch.no_grad():
            if declared is None:
                return _averaged(self.module, buffers, contributed)
            for given in contributed:
                buffers = _updated(who, declared, buffers, given)
        return buffers


def running_modules(layer: nn.Module) -> list[RunningModule]:
    """Return the modules of a layer whose forward updates buffers, in the order of `named_modules`."""
    found = []
    for path, module in layer.named_modules():
        declared = _declared(module)
        if declared is not None:
            found.append(RunningModule(module, path, declared.names))
        elif isinstance(module, _BatchNorm | _InstanceNorm) and isinstance(module._buffers.get("running_mean"), Tensor):
            names = [name for name in (*_STATISTICS, _COUNT) if isinstance(module._buffers.get(name), Tensor)]
            found.append(RunningModule(module, path, tuple(names)))
    return found


def spectrally_normed(layer: nn.Module) -> str:
    """Return the name of a parameter with torch's spectral_norm, of either kind, that updates in a forward."""
    for path, module in layer.named_modules():
        if isinstance(module, _SpectralNorm) and module.training:
            return str(path).replace("parametrizations.", "").rpartition(".")[0]
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm) and module.training:
                return f"{path}.{hook.name}" if path else str(hook.name)
    return ""


def shared_buffer(one: str, other: str) -> TaskError:
    """Return the error for a buffer of several modules. one, other: "<layer>.<name>"."""
    return TaskError(
        f"{one} and {other} are one buffer that a forward updates (BatchNorm's running statistics), and not of one "
        "module in one layer: give each layer its own, or track_running_stats=False"
    )


def _updated(who: str, declared: _Declared, buffers: Mapping[str, Tensor], given: Parts) -> dict[str, Tensor]:
    with in_task(f"the update of the buffers of {who}"):
        result = declared.update(dict(buffers), *given)
    if not isinstance(result, Mapping) or result.keys() != buffers.keys():
        names = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
        raise TaskError(f"the update of the buffers of {who} returned {names}, expected {sorted(buffers)}")
    for name, buffer in buffers.items():
        value = result[name]
        if not isinstance(value, Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(
                f"the update of the buffers of {who} returned {got} for {name!r}, expected {buffer.dtype} "
                f"{list(buffer.shape)}"
            )
    return {name: result[name] for name in buffers}


def _averaged(module: nn.Module, buffers: dict[str, Tensor], contributed: Sequence[Parts]) -> dict[str, Tensor]:
    """Return the buffers as torch's own forwards average them one after the other, from each contribution's mean and
    variance.
    """
    assert isinstance(module, _BatchNorm | _InstanceNorm)
    running = torch.cat([buffers[name].reshape(-1) for name in _STATISTICS])
    count = buffers.get(_COUNT)
    counts = isinstance(module, _BatchNorm) and count is not None
    for given in contributed:
        if counts and count is not None:
            count += 1
        factor = module.momentum
        if factor is None:  # BatchNorm: the mean over all batches; InstanceNorm: unchanged
            factor = 1.0 / float(count) if counts and count is not None else 0.0
        batch = torch.cat([tensor.reshape(-1) for tensor in given])
        running.mul_(1.0 - factor).add_(batch, alpha=factor)
    values = torch.split(running, [buffers[name].numel() for name in _STATISTICS])
    return buffers | {n: v.view(buffers[n].shape) for n, v in zip(_STATISTICS, values, strict=True)}
