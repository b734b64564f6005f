"""Trained weights in memory, as a plain state dict: `bamboo.load`."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bamboo_core.complaints import complain
from bamboo_core.storage.errors import StorageError
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.sources import open_source
from bamboo_trainer.checkpoint.state_dict import by_file

_OF_MODULE: Final = re.compile(r"layers\.\d+\.module\.(.+)")  # as `from_module` calls its layers' tensors


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
    names = module_names([entry.name for entry in entries])
    return {names.get(entry.name, entry.name): found[entry.name] for entry in entries}


def module_names(names: Collection[str]) -> dict[str, str]:
    """The name in the whole module for each name in a layer of it; {} if they are not those of one split module."""
    found = {name: match[1] for name in names if (match := _OF_MODULE.fullmatch(name))}
    return found if len(set(found.values())) == len(names) else {}
