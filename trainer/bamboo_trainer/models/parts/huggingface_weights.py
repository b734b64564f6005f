"""The tensors of a published folder: config.json with model.safetensors, or with several files and their index.

Each tensor is read when needed. Before that, only the files' beginnings are read.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bamboo_core.complaints import said_by

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_OLDER: Final = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


class PublishedWeights:
    """The weights in a folder, by published names. Raises ValueError, a sentence for the user, for an incomplete
    folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = self._found()

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the folder's values of these tensors in fp32. wanted: by the model's names, tensors of the wanted
        forms; a tensor may have several names in the model, and one in the folder.
        """
        values: dict[int, Tensor] = {}
        for name, form in wanted.items():
            published = self._name(name)
            if published is not None and id(form) not in values:
                values[id(form)] = self._tensor(published, form)
        return {name: values[id(form)] for name, form in wanted.items() if id(form) in values}

    def check(self, wanted: Mapping[str, Tensor], may_lack: Callable[[str], bool] = lambda name: False) -> list[str]:
        """Return parameters that the folder lacks, and that may begin with random values; ValueError for others."""
        known = {id(form) for name, form in wanted.items() if self._name(name) is not None}
        lacks = [n for n, form in wanted.items() if id(form) not in known and isinstance(form, torch.nn.Parameter)]
        for name in lacks:
            if not may_lack(name):
                raise ValueError(
                    f"model: {self.folder} has no tensor {name}; to begin with random values say random: true"
                )
        return lacks

    def _name(self, name: str) -> str | None:
        """Return the folder's name of it: a model may be published without its head, or under older names."""
        _, _, without = name.partition(".")
        candidates = [name, without, *(f"{base}.{name}" for base in ("model", "transformer", "bert"))]
        for new, old in _OLDER:
            candidates += [c.removesuffix(new) + old for c in (name, without) if c.endswith(new)]
        return next((c for c in candidates if c in self._files), None)

    def _tensor(self, name: str, form: Tensor) -> Tensor:
        path = self._files[name]
        with opened(path) as file:
            if name not in file.keys():  # noqa: SIM118
                raise ValueError(f"model: {path} does not have the tensor {name} that the index says it has")
            found: Tensor = file.get_tensor(name)
        kind = found.dtype in FLOATS if form.is_floating_point() else found.dtype == form.dtype
        if found.shape != form.shape or not kind:
            raise ValueError(
                f"model: {name} in {path} is {found.dtype} {list(found.shape)}, expected {list(form.shape)} in "
                "float32, bfloat16 or float16"
            )
        return found.to(form.dtype, copy=True)  # a copy, not a view of the file

    def _found(self) -> dict[str, Path]:
        if not (self.folder / SINGLE).exists() and not (self.folder / INDEX).exists():
            raise ValueError(
                f"model: {self.folder} has neither {SINGLE} nor {INDEX}; to begin with random values say random: true"
            )
        try:
            return published_files(self.folder)
        except ValueError as error:
            raise ValueError(f"model: {error}") from None


def published_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by its published name. Raises ValueError if the index is invalid."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        with opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(f"{index} must have a weight_map of tensor names to file names")
    if strange := [file for file in named.values() if Path(file).name != file]:
        raise ValueError(f"{index} names {strange[0]}, expected the name of a file beside it")
    if missing := sorted({file for file in named.values() if not (folder / file).is_file()}):
        raise ValueError(f"{index} names {missing[0]}, which is not there")
    return {name: folder / file for name, file in named.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {said_by(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {said_by(error)}") from None
