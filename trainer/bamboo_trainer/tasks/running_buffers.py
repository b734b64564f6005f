"""Running statistics of norms (BatchNorm, InstanceNorm): forwards capture batches' statistics, and update nothing.

This or another worker may repeat a forward, so a forward changes nothing. It captures the mean and variance of each
batch that a norm sees. Their weighted sums are a part of the stage's gradient, summed, sent and repeated with it
(`FlatParameters`). After the optimizer's step, they are added to the running statistics (`StageValues.apply`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from bamboo_trainer.tasks.task_errors import TaskError

Parts = tuple[Tensor, ...]
Contributed = list[tuple[nn.Module, Parts]]  # in order


@dataclass(slots=True)
class Capture:
    """The batch means and variances that norms saw in a forward, and the losses that layers added, in order."""

    # fill, count, momentum: BatchNorm's running statistics, number of batches and momentum meanwhile; momentum is 1,
    # or 0.5 with a fill of 0. Neither contributions nor outputs may depend on them.
    fill: float = 1.0
    count: int = 0
    momentum: float = 1.0
    contributed: Contributed = field(default_factory=list)
    losses: list[tuple[str, Tensor]] = field(default_factory=list)
    _closed: bool = False

    def contribute(self, module: nn.Module, given: Parts) -> None:
        if not self._closed:
            self.contributed.append((module, given))

    def add_loss(self, name: str, value: Tensor) -> None:
        if not self._closed:
            self.losses.append((name, value))

    def close(self) -> None:
        """End the capture: ignore later contributions, such as those of a forward repeated in the backward."""
        self._closed = True


_CAPTURE: Final[ContextVar[Capture | None]] = ContextVar("capture", default=None)


def current() -> Capture | None:
    return _CAPTURE.get()


class capturing:
    """A context in which forwards add norms' batch statistics and layers' losses to a `Capture`."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __enter__(self) -> None:
        self._token = _CAPTURE.set(self._capture)

    def __exit__(self, *_: object) -> None:
        _CAPTURE.reset(self._token)


_STATISTICS: Final = ("running_mean", "running_var")
_COUNT: Final = "num_batches_tracked"
_INTERCEPTED: Final[WeakSet[nn.Module]] = WeakSet()


def intercept(module: nn.Module) -> None:
    """Make a norm's forwards leave its running statistics unchanged from now on, within `capturing` or not."""
    if module in _INTERCEPTED:
        return
    _INTERCEPTED.add(module)
    lent = _LentStatistics()
    module.register_forward_pre_hook(lent.lend)
    module.register_forward_hook(lent.take_back, always_call=True)


class _LentStatistics:
    """Hooks around a BatchNorm's or InstanceNorm's forward that give it temporary buffers for batch statistics."""

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
    """Put layers into eval mode, in which norms capture nothing; then restore the mode of each of their modules."""
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True, slots=True, eq=False)
class RunningNorm:
    """A norm with running statistics. path: its name in the layer, "" if it is the layer. names: its buffers' names."""

    module: _BatchNorm | _InstanceNorm
    path: str
    names: tuple[str, ...]

    @property
    def contributes(self) -> bool:
        """Whether batches change the running statistics: the norm is in training mode, unlike a frozen BatchNorm."""
        return self.module.training

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: self.module.get_buffer(name) for name in self.names}

    def place(self, name: str) -> str:
        """Return a buffer's name in the layer. name: its name in the norm."""
        return f"{self.path}.{name}" if self.path else name

    @property
    def size(self) -> int:
        """The number of elements in a step's sums: means, variances, the weight, and the number of batches."""
        return 2 * self.module.get_buffer(_STATISTICS[0]).numel() + 2

    @property
    def _averages(self) -> bool:
        """Whether all batches count alike, as in a BatchNorm without a momentum."""
        return self.module.momentum is None and isinstance(self.module, _BatchNorm) and _COUNT in self.names

    def weighed(self, batches: Sequence[Parts], following: int) -> Tensor:
        """Return one microbatch's part of the step's sums, [`size`]. batches: each one's mean and variance, in order.
        following: the number of the step's later microbatches, which reduce this one's weight, as in plain PyTorch.
        """
        factor = 1.0 if self._averages else self.module.momentum or 0.0
        keeps = 1.0 if self._averages else 1.0 - factor
        rest = keeps ** (len(batches) * following)
        sums = torch.zeros(self.size, device=batches[0][0].device)
        for mean, variance in batches:
            sums[:-2].mul_(keeps).add_(torch.cat([mean.reshape(-1), variance.reshape(-1)]).mul_(factor))
        sums.mul_(rest)
        sums[-2] = len(batches) if self._averages else (1.0 - keeps ** len(batches)) * rest
        sums[-1] = len(batches)
        return sums

    def add(self, sums: Tensor) -> None:
        """Add a step's sums to the running statistics. Compute on the host, so that all holders of the layer get the
        same bits.
        """
        sums = sums.cpu()
        buffers, weight, number = self.buffers, float(sums[-2]), int(sums[-1])
        if not number:
            return
        if self._averages:
            whole = int(buffers[_COUNT]) + number
            sums, weight = sums / whole, number / whole  # a copy: the gradient may be on its way to replicas
        with torch.no_grad():
            for name, added in zip(_STATISTICS, sums[:-2].chunk(2), strict=True):
                old = buffers[name].cpu()
                buffers[name].copy_(old.mul(1.0 - weight).add(added.view(old.shape)))
            if _COUNT in buffers and isinstance(self.module, _BatchNorm):
                buffers[_COUNT].add_(number)


def running_norms(layer: nn.Module) -> list[RunningNorm]:
    """Return the norms of a layer that keep running statistics, in the order of `named_modules`."""
    norms = []
    for path, module in layer.named_modules():
        if isinstance(module, _BatchNorm | _InstanceNorm) and isinstance(module._buffers.get("running_mean"), Tensor):
            names = [name for name in (*_STATISTICS, _COUNT) if isinstance(module._buffers.get(name), Tensor)]
            norms.append(RunningNorm(module, path, tuple(names)))
    return norms


def spectrally_normed(layer: nn.Module) -> str:
    """Return the name of a parameter whose spectral_norm, of either kind in torch, a forward would update; else ""."""
    for path, module in layer.named_modules():
        if isinstance(module, _SpectralNorm) and module.training:
            return str(path).replace("parametrizations.", "").rpartition(".")[0]
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm) and module.training:
                return f"{path}.{hook.name}" if path else str(hook.name)
    return ""


def shared_buffer(one: str, other: str) -> TaskError:
    """Return the error for a running buffer that modules or layers share. one, other: its names "<layer>.<name>"."""
    return TaskError(
        f"{one} and {other} are one buffer that a forward updates (BatchNorm's running statistics), and not of one "
        "module in one layer: give each layer its own, or track_running_stats=False"
    )
