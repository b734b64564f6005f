"""Adapters in PEFT's own files: adapter_config.json and adapter_model.safetensors.

PEFT's names come from the whole module: `base_model.model.`, the linear layer's own name, `.lora_A.weight`.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from bamboo_trainer.models.parts.huggingface_weights import opened, read_json

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MODULE: Final = "module."  # prefix of the whole module's names in a layer of a split one
_BEFORE: Final = "base_model.model."
_ENDS: Final = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_NOT_PLAIN: Final = (  # settings that make an adapter other than base(x) + scale * B(A(x))
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"),
    "monteclora_config",
)
_BEGINS_PLAIN: Final = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base, too


def peft_name(name: str) -> str:
    """Return PEFT's name of an adapter's or a trained parameter. name: in the whole module."""
    at, _, leaf = name.rpartition(".")
    return _BEFORE + (f"{at}.{_ENDS[leaf]}" if leaf in _ENDS else name)


def _our_name(key: str) -> str:
    name = key.removeprefix(_BEFORE)
    for leaf, end in _ENDS.items():
        if name.endswith(f".{end}"):
            return name.removesuffix(end) + leaf
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """An adapter in PEFT's files; see `bamboo_trainer.lora.Adapters`. updates: rank and scale by the linear layer's
    name in the whole module.

    keys: of the file, by the parameters' names in the whole module. trained: patterns of other trained parameters.
    """

    folder: Path
    dropout: float
    updates: Mapping[str, tuple[int, float]]
    keys: Mapping[str, str]
    trained: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path, dropout: float | None = None, trained: Collection[str] = ()) -> "PeftAdapter":
        """Read an adapter, of its weights only the header. Raises ValueError, a sentence, unless it is a plain LoRA."""
        if not (folder / CONFIG).is_file():
            raise ValueError(f"adapter: {folder} has no {CONFIG}, as PEFT's save_pretrained writes it")
        config = read_json(folder / CONFIG)
        _check_plain(config, folder / CONFIG)
        with opened(folder / WEIGHTS) as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        keys = {_our_name(key): key for key in shapes}
        ranks = {name[: -len(".lora_a")]: shapes[key][0] for name, key in keys.items() if name.endswith(".lora_a")}
        strange = [key for name, key in keys.items() if ".lora_" in name and not name.endswith((".lora_a", ".lora_b"))]
        if strange:
            raise ValueError(
                f"adapter: {folder / WEIGHTS} has {strange[0]}, which is no part of an nn.Linear's adapter"
            )
        if lacking := next((at for at in ranks if f"{at}.lora_b" not in keys), None):
            raise ValueError(f"adapter: {folder / WEIGHTS} has no {peft_name(f'{lacking}.lora_b')}")
        return cls(
            folder=folder,
            dropout=float(config.get("lora_dropout") or 0.0) if dropout is None else dropout,
            updates={at: (rank, _scale(config, at, rank)) for at, rank in ranks.items()},
            keys=keys,
            trained=tuple(trained),
        )

    def at(self, name: str) -> tuple[int, float] | None:
        return self.updates.get(name.removeprefix(MODULE))

    def trains(self, name: str) -> bool:
        return name.removeprefix(MODULE) in self.keys or any(fnmatchcase(name, pattern) for pattern in self.trained)

    def value(self, name: str) -> Tensor | None:
        key = self.keys.get(name.removeprefix(MODULE))
        if key is None:
            return None
        with opened(self.folder / WEIGHTS) as file:
            found: Tensor = file.get_tensor(key)
        return found

    def check(self, linears: Collection[str] | None) -> None:
        known = {name.removeprefix(MODULE) for name in linears or ()}
        strange = next((at for at in self.updates if at not in known), None)
        if linears is not None and strange is not None:
            raise ValueError(f"adapter: {self.folder} has one of {strange}, which is no nn.Linear of the model")


def _check_plain(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapter: {path} must have peft_type LORA, got {config.get('peft_type')!r}")
    strange = next((key for key in _NOT_PLAIN if config.get(key)), None)
    if strange is None and config.get("bias", "none") != "none":
        strange = "bias"
    if strange is None and config.get("init_lora_weights") not in _BEGINS_PLAIN:
        strange = "init_lora_weights"
    if strange is not None:
        raise ValueError(f"adapter: {path} has {strange}: {config[strange]!r}, expected a plain LoRA adapter")


def _scale(config: Mapping[str, Any], at: str, rank: int) -> float:
    """Return PEFT's scale. at: the linear layer's name."""
    patterns = config.get("alpha_pattern") or {}
    own = next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", at)), None)
    alpha = config.get("lora_alpha", 8) if own is None else patterns[own]
    if not isinstance(alpha, int | float):
        raise ValueError(f"adapter: lora_alpha must be a number, got {alpha!r}")
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
