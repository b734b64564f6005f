"""Trained weights in memory, as a plain state dict: `bamboo.load`."""

from pathlib import Path

import torch
from torch import Tensor

from bamboo_core.complaints import complain
from bamboo_core.storage.errors import StorageError
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.sources import open_source, under_module_names
from bamboo_trainer.checkpoint.state_dict import by_file


def load(url: str | Path, *, step: int | None = None) -> dict[str, Tensor]:
    """Load the parameters and buffers of a file or folder of weights, or of a checkpoint, on the CPU.

    Tensors of a module split by `from_module` have the names of the module's own `state_dict`, all others
    "layers.NUMBER.NAME".

    url: the folder `weights` written by `bamboo run --output`, a file or folder of safetensors such as an export, or
    the place of checkpoints. step: of a checkpoint; None: the newest sound one. Raises StorageError if nothing is
    there, or it is damaged.
    """
    try:
        source, passed = open_source(str(url), step)
        entries = under_module_names(source, source.entries())
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
    return {entry.name: found[entry.name] for entry in entries}
