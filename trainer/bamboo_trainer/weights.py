"""Trained weights in memory, as a plain state dict: `bamboo.load`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bamboo_core.complaints import complain
from bamboo_core.storage.errors import StorageError
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.sources import open_source
from bamboo_trainer.checkpoint.state_dict import by_file
from bamboo_trainer.tasks.user_code import same_bits

OF_MODULE: Final = re.compile(r"layers\.\d+\.module\.(.+)")  # as `from_module` calls its layers' tensors


def load(url: str | Path, *, step: int | None = None, averaged: bool = False) -> dict[str, Tensor]:
    """The parameters and buffers in a folder of weights, or in a checkpoint, on the CPU.

    Those of a module that `from_module` has split have the names of the module's own `state_dict`, all others
    "layers.NUMBER.NAME".

    url: what `bamboo run --output` has written (its folder weights), or where checkpoints are. step: of a checkpoint;
    None: the newest sound one. averaged: what training.ema keeps, instead of the weights. Raises StorageError if
    nothing is there, it is damaged, or there are no averages.
    """
    try:
        source, passed = open_source(str(url), step, averaged=averaged)
        entries = source.entries()
    except ExportError as error:
        raise StorageError(str(error)) from None
    for note in passed:
        complain(note)
    found = {}
    for file, wanted in by_file(entries).items():
        tensors = source.tensors(file, wanted)
        for entry in wanted:
            tensor = tensors[entry.tensor]
            found[entry.name] = torch.view_as_complex(tensor) if entry.complex else tensor
    ordered = {entry.name: found[entry.name] for entry in entries}
    return _of_module(ordered) or ordered


def _of_module(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in the whole module; {} if they are not those of one split module. A tied tensor is in
    several layers, by the same name.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in found.items():
        match = OF_MODULE.fullmatch(name)
        if match is None or not same_bits(whole.setdefault(match[1], tensor), tensor):
            return {}
    return whole
