"""LoRA, low-rank adapters: training of a small update to chosen linear layers (Hu et al., 2021).

    def build(config):
        return with_lora(huggingface.build(config), rank=8, targets=("*q_proj", "*v_proj"))

All else is frozen, so only the adapters have gradients, optimizer state and replicas of it. `with_peft` begins with
adapters that PEFT has saved, and `bamboo export --format peft` writes its files.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final

from torch import Tensor, nn
from torch.nn import functional as F

from bamboo_trainer.models.huggingface_files import PeftAdapter
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection import Walk, look, values_wanted

ADAPTER: Final = ("lora_a", "lora_b", "lora_scale")  # its tensors, in addition to the modules of its base
_A, _B, _SCALE = ADAPTER
_BASE: Final = "base."


class LoraLinear(nn.Module):
    """A linear layer with an adapter: base(x) + scale * B(A(dropout(x))); the base is frozen, and B begins with zeros,
    so at first nothing changes.
    """

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
    """Return the task with LoRA adapters at each `nn.Linear` whose name in its layer matches a target, all else frozen.

    rank: of the update. alpha: its scale is alpha / rank; by default 1. dropout: of the adapters' inputs. targets,
    trained: patterns such as "*q_proj" or "attention.*"; parameters that match `trained` are trained themselves. A
    layer that is itself a Linear has the name "". Raises ValueError, also if nothing matches the targets.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    scale = 1.0 if alpha is None else alpha / rank
    chosen = Fitting(rank=rank, scale=scale, dropout=dropout, targets=tuple(targets), trained=tuple(trained))
    return with_adapters(task, chosen)


def with_peft(task: Task, folder: str | Path, *, dropout: float | None = None, trained: Collection[str] = ()) -> Task:
    """Return the task of a split module with the LoRA adapters that PEFT has saved in a folder; freeze all else, except
    modules that PEFT has saved as a whole (`modules_to_save`). dropout: None uses the saved one. trained: see
    `with_lora`. Raises ValueError.
    """
    return with_adapters(task, PeftAdapter.read(Path(folder), dropout, trained))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """New LoRA adapters of one rank and scale, at the linear layers whose names match a target.

    targets, trained: name patterns; parameters that match `trained` are trained themselves. dropout: share of the
    adapters' inputs that is dropped. Same interface as `PeftAdapter`.
    """

    rank: int
    scale: float
    dropout: float
    targets: tuple[str, ...]
    trained: tuple[str, ...]

    def at(self, name: str) -> tuple[int, float] | None:
        """Return the rank and the scale of a linear layer's adapter; None if it has no adapter."""
        return (self.rank, self.scale) if any(fnmatchcase(name, pattern) for pattern in self.targets) else None

    def trains(self, name: str) -> bool:
        """Return whether a layer's own parameter is trained, and not frozen."""
        return any(fnmatchcase(name, pattern) for pattern in self.trained)

    def value(self, name: str) -> Tensor | None:
        """Return a parameter's initial value; here None: it keeps its own. (`PeftAdapter` returns saved values.)"""
        return None

    def check(self, linears: Collection[str]) -> None:
        """Raise ValueError if no linear layer matches a target. linears: names of all linear layers of the task."""
        if any(map(self.at, linears)):
            return
        names = ", ".join(map(repr, list(linears)[:8])) or "none"
        raise ValueError(f"lora: no nn.Linear fits the targets {list(self.targets)}; there are {names}")


Adapters = Fitting | PeftAdapter
_Names = tuple[tuple[str, ...], bool]  # the names of a layer's linear layers; whether it is of a split module


def with_adapters(task: Task, adapters: Adapters) -> Task:
    """Return the task with LoRA adapters, all else frozen. Raises ValueError for an adapter without an nn.Linear."""
    linears = look(task, (), _linears_of)
    adapters.check(tuple(dict.fromkeys(name for names, _ in linears for name in names)))
    again = [_again(index, linears) for index in range(len(linears))]
    layers = tuple(
        partial(_adapted, factory, adapters, skipped) for factory, skipped in zip(task.layers, again, strict=True)
    )
    adapted = [
        {name for name in names if adapters.at(name)} - skipped
        for (names, _), skipped in zip(linears, again, strict=True)
    ]
    return replace(task, layers=layers, tied=_renamed(task, adapted))


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge LoRA adapters into the weights of a state dict; return it under the original model's names."""
    weights: dict[str, Tensor] = {}
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
        weights[name] = tensor
    return weights


def _adapted(factory: Callable[[], nn.Module], adapters: Adapters, skipped: Collection[str]) -> nn.Module:
    """Build a layer, and put adapters into it; only they and `adapters.trains` parameters are trained."""
    layer = factory()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(adapters.trains(name))
    for name, linear in list(_linears(layer)):
        if name not in skipped and (adapter := adapters.at(name)):
            layer = _put(layer, name, LoraLinear(linear, *adapter, adapters.dropout))
    if values_wanted():
        for name, parameter in layer.named_parameters():
            value = adapters.value(name) if parameter.requires_grad else None
            if value is None:
                continue
            if value.shape != parameter.shape:
                raise ValueError(f"adapter: {name} is {list(value.shape)} there, expected {list(parameter.shape)}")
            parameter.data.copy_(value)
    return layer


def _put(layer: nn.Module, name: str, adapter: LoraLinear) -> nn.Module:
    """Replace the layer's module of that name by the adapter; return the layer, or the adapter if the name is ""."""
    if not name:
        return adapter
    parent, _, last = name.rpartition(".")
    setattr(layer.get_submodule(parent), last, adapter)
    return layer


def _linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers whose weight is the layer's own. A layer of a split module also has the others' modules,
    as mere shells.
    """
    own = dict(layer.named_parameters(remove_duplicate=False))
    for name, module in layer.named_modules():
        if f"{name}.weight".lstrip(".") in own and isinstance(module, nn.Linear):
            yield name, module


def _renamed(task: Task, adapted: Sequence[Collection[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the task's tied groups, with a weight that has an adapter under its new name, `base.weight` of the
    adapter. adapted: names of linear layers with adapters, by layer.
    """

    def renamed(tied: str) -> str:
        index, _, name = tied.partition(".")
        at, _, last = name.rpartition(".")
        if not index.isdecimal() or int(index) >= len(task.layers):
            return tied  # refused where ties are checked
        adapter = f"{at}." if at else ""
        return f"{index}.{adapter}{_BASE}{last}" if at in adapted[int(index)] else tied

    return tuple(tuple(map(renamed, group)) for group in task.tied)


def _linears_of(walk: Walk, index: int, _: object) -> tuple[_Names, object]:
    layer = walk.layer(index)
    return (tuple(name for name, _ in _linears(layer)), isinstance(layer, SplitLayer)), ()


def _again(index: int, linears: Sequence[_Names]) -> set[str]:
    """Return the names of a split module's linear layers that appear again in a later layer: a head whose weight is the
    embedding's is in the embedding's layer, too, and runs in the last one.
    """
    names, is_split = linears[index]
    later = {name for others, _ in linears[index + 1 :] for name in others}
    return later.intersection(names) if is_split else set()
