"""Low-rank adapters: what is trained is a small update beside chosen linear layers (LoRA, Hu et al., 2021).

    def build(config):
        return with_lora(huggingface.build(config), rank=8, targets=("*q_proj", "*v_proj"))

All else is frozen, so gradients, the optimizer's state and replicas of it are those of the adapters alone.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bamboo_trainer.task import Task

logger = logging.getLogger(__name__)

_A, _B, _SCALE, _BASE = "lora_a", "lora_b", "lora_scale", "base."


class LoraLinear(nn.Module):
    """base(x) + scale * B(A(dropout(x))); the base is frozen, and B begins with zeros, so at first nothing changes."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.register_buffer(_SCALE, base.weight.new_tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(self.dropout(x), self.lora_a), self.lora_b)
        out: Tensor = self.base(x) + update * self.get_buffer(_SCALE)
        return out


def with_lora(
    task: Task,
    *,
    rank: int,
    targets: Collection[str] = ("*",),
    alpha: float | None = None,
    dropout: float = 0.0,
    trained: Collection[str] = (),
) -> Task:
    """The task with adapters at each `nn.Linear` whose name in its layer fits one of the targets, and all else frozen.

    rank: of the update. alpha: its scale is alpha / rank; by default 1. dropout: of the adapters' inputs. targets,
    trained: patterns such as "*q_proj" or "attention.*"; the parameters that fit `trained` are trained as they are. A
    layer that is itself a Linear has the name "". Raises ValueError, also if nothing fits the targets.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    scale = 1.0 if alpha is None else alpha / rank
    wanted = tuple(targets)
    _check_targets(task, wanted)
    adapted = partial(_adapted, rank=rank, scale=scale, dropout=dropout, targets=wanted, trained=tuple(trained))
    layers = tuple(partial(adapted, factory) for factory in task.layers)
    return replace(task, layers=layers, tied=_renamed(task, wanted))


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict, such as an export's, with the updates added to the weights, under the original model's names."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".")
        if last in (_A, _B, _SCALE):
            continue
        at = prefix.removesuffix(_BASE[:-1]).removesuffix(".")
        adapter = f"{at}." if at else ""
        if (f"{prefix}." if prefix else "").endswith(_BASE) and f"{adapter}{_A}" in state:
            if last == "weight":
                update = state[f"{adapter}{_B}"] @ state[f"{adapter}{_A}"]
                tensor = tensor + update * state[f"{adapter}{_SCALE}"]
            name = f"{adapter}{last}"
        found[name] = tensor
    return found


def _adapted(
    factory: Callable[[], nn.Module],
    *,
    rank: int,
    scale: float,
    dropout: float,
    targets: tuple[str, ...],
    trained: tuple[str, ...],
) -> nn.Module:
    """A layer of the factory's, with adapters. Its first values are those that it has without them."""
    layer = factory()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trained))
    for name, linear in list(_linears(layer, targets)):
        adapter = LoraLinear(linear, rank, scale, dropout)
        if not name:
            return adapter
        parent, _, last = name.rpartition(".")
        setattr(layer.get_submodule(parent), last, adapter)
    return layer


def _linears(layer: nn.Module, targets: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers whose weight is the layer's own. A layer of a split module has the others' modules, too, as
    mere shells.
    """
    own = dict(layer.named_parameters(remove_duplicate=False))
    for name, module in layer.named_modules():
        if (
            f"{name}.weight".lstrip(".") in own
            and isinstance(module, nn.Linear)
            and any(fnmatchcase(name, pattern) for pattern in targets)
        ):
            yield name, module


def _renamed(task: Task, targets: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The task's tied parameters by their names with adapters: a head's weight is its adapter's base's."""
    linears: dict[int, set[str]] = {}

    def renamed(tied: str) -> str:
        index, _, name = tied.partition(".")
        at, _, last = name.rpartition(".")
        if not index.isdecimal() or int(index) >= len(task.layers):
            return tied  # refused where ties are checked
        if int(index) not in linears:
            layer = _without_values(task.layers[int(index)])
            linears[int(index)] = {name for name, _ in _linears(layer, targets)} if layer else set()
        adapter = f"{at}." if at else ""
        return f"{index}.{adapter}{_BASE}{last}" if at in linears[int(index)] else tied

    return tuple(tuple(map(renamed, group)) for group in task.tied)


def _without_values(factory: Callable[[], nn.Module]) -> nn.Module | None:
    """A layer on the meta device; None if a factory cannot make one that way."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception as error:  # whatever a factory raises that needs values
        logger.info("lora: a layer's names are not looked at in advance: %s", error)
        return None


def _check_targets(task: Task, targets: tuple[str, ...]) -> None:
    """Raises ValueError if no layer has an nn.Linear that fits the targets. It looks at layers without values; if a
    factory cannot make one that way, nothing is checked.
    """
    names = []
    for factory in task.layers:
        layer = _without_values(factory)
        if layer is None:
            return
        if any(True for _ in _linears(layer, targets)):
            return
        names += [name for name, _ in _linears(layer, ("*",))]
    there = ", ".join(map(repr, dict.fromkeys(names[:8]))) or "none"
    raise ValueError(f"lora: no nn.Linear fits the targets {list(targets)}; there are {there}")
