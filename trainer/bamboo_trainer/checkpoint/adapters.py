"""Adapters of `bamboo_trainer.lora` in a checkpoint or in weights: merged into the model, or as a folder for PEFT."""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.sources import StateSource
from bamboo_trainer.checkpoint.state_dict import StateEntry, by_file
from bamboo_trainer.lora import ADAPTER
from bamboo_trainer.models.parts.peft_files import CONFIG, peft_name

_TASK_TYPES: Final = {"causal": "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntries:
    """The tensors of an adapter, and the weight that it adapts. name: the linear layer's."""

    name: str
    base: StateEntry
    a: StateEntry
    b: StateEntry
    scale: StateEntry


def adapters_in(entries: Sequence[StateEntry]) -> tuple[AdapterEntries, ...]:
    by_name = {entry.name: entry for entry in entries}
    first = f".{ADAPTER[0]}"
    names = [entry.name.removesuffix(first) for entry in entries if entry.name.endswith(first)]
    adapters = []
    for name in names:
        base, a, b, scale = (by_name.get(f"{name}.{part}") for part in ("base.weight", *ADAPTER))
        if base and a and b and scale:
            adapters.append(AdapterEntries(name=name, base=base, a=a, b=b, scale=scale))
    return tuple(adapters)


class MergedSource:
    """A `StateSource` that adds another source's adapters to the weights that they adapt. A source without adapters
    stays unchanged. count: of its adapters.
    """

    def __init__(self, source: StateSource) -> None:
        """Find the source's adapters. Raises ExportError if a weight with an adapter is also another layer's."""
        self._source = source
        entries = source.entries()
        self._adapters = {(one.base.layer, one.base.tensor): one for one in adapters_in(entries)}
        parts = {part.name for one in self._adapters.values() for part in (one.a, one.b, one.scale)}
        bases = {f"{one.name}.base." for one in self._adapters.values()}
        self._entries = tuple(_without_base(entry, bases) for entry in entries if entry.name not in parts)
        uses = Counter((entry.layer, entry.tensor) for entry in self._entries)
        for place, one in self._adapters.items():
            if uses[place] > 1 or one.base.layer != one.a.layer:
                raise ExportError(
                    f"{one.base.name} is tied to another layer's weight, so its adapter cannot be merged: an export "
                    "with --format peft keeps it beside the model"
                )
        self.count = len(self._adapters)

    @property
    def step(self) -> int | None:
        return self._source.step

    def entries(self) -> tuple[StateEntry, ...]:
        return self._entries

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        places = [(entry.layer, entry.tensor) for entry in entries]
        adapters = [self._adapters[place] for place in places if place in self._adapters]
        parts = [part for one in adapters for part in (one.a, one.b, one.scale)]
        found = dict(self._source.tensors(file, [*entries, *parts]))
        for one in adapters:
            a, b, scale = (found[part.tensor].float() for part in (one.a, one.b, one.scale))
            weight = found[one.base.tensor]
            found[one.base.tensor] = (weight.float() + (b @ a) * scale).to(weight.dtype)
        return found


def _without_base(entry: StateEntry, bases: Collection[str]) -> StateEntry:
    at, _, leaf = entry.name.rpartition(".")
    return replace(entry, name=f"{at.removesuffix('base')}{leaf}") if f"{at}." in bases else entry


def peft_entries(entries: Sequence[StateEntry], trained: Collection[str]) -> tuple[StateEntry, ...]:
    """Return the entries of adapters, and of parameters trained in addition, under PEFT's names. entries: under the
    model's own names. Raises ExportError if there are no adapters.
    """
    adapters = adapters_in(entries)
    if not adapters:
        raise ExportError("the weights have no adapters of bamboo_trainer.lora, which the format peft is for")
    parts = [part for one in adapters for part in (one.a, one.b)]
    parts += [entry for entry in entries if entry.name in trained]
    return tuple(replace(part, name=peft_name(part.name)) for part in parts)


def describe(
    source: StateSource, entries: Sequence[StateEntry], trained: Collection[str], facts: Mapping[str, Any], folder: Path
) -> None:
    """Write adapter_config.json. entries: under the model's own names. facts: objective, base, revision, dropout."""
    adapters = adapters_in(entries)
    scales: dict[str, float] = {}
    for file, found in by_file([one.scale for one in adapters]).items():
        tensors = source.tensors(file, found)
        scales |= {entry.name: float(tensors[entry.tensor]) for entry in found}
    ranks = {one.name: one.a.shape[0] for one in adapters}
    alphas = {one.name: _alpha(scales[one.scale.name], ranks[one.name]) for one in adapters}
    (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
    config = {
        "peft_type": "LORA",
        "task_type": _TASK_TYPES.get(facts["objective"]),
        "base_model_name_or_path": facts["base"],
        "revision": facts["revision"],
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": facts["dropout"],
        "target_modules": _targets(ranks, entries),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in trained}) or None,
        "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {name: own for name, own in alphas.items() if own != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _alpha(scale: float, rank: int) -> float:
    """Return the number that gives this scale in fp32, a short one if there is one."""
    short = float(f"{scale * rank:.6g}")
    found = short if float(torch.tensor(short / rank, dtype=torch.float32)) == scale else scale * rank
    return int(found) if math.isfinite(found) and found == int(found) else found


def _targets(adapted: Collection[str], entries: Sequence[StateEntry]) -> list[str]:
    """Return the last parts of the names, where every module of that name has an adapter; else the whole names."""
    others = {entry.name.removesuffix(".weight").rpartition(".")[2] for entry in entries if _is_weight(entry.name)}
    leaves = {name: name.rpartition(".")[2] for name in adapted}
    return sorted({name if leaf in others else leaf for name, leaf in leaves.items()})


def _is_weight(name: str) -> bool:
    return name.endswith(".weight") and not name.endswith(".base.weight")
