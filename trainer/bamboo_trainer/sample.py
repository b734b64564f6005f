"""What the trained model has to say: `sample(manifest, weights_dir)`, called by the launcher after the job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.checkpoint.weights_folder import STAGE_FILES
from bamboo_trainer.loading import task_of


def sample(manifest: Mapping[str, Any], weights_dir: str) -> str | None:
    """The task's demonstration with the saved weights; None if the task has none.

    Raises ValueError if the files do not hold exactly the layers' tensors.
    """
    spec = parse_manifest(manifest)
    task = task_of(spec)
    if task.sample is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(weights_dir).glob(STAGE_FILES)):
        tensors |= load_file(path)
    layers = [build() for build in task.layers]
    wanted: set[str] = set()
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        wanted |= {prefix + name for name in own}
        try:
            layer.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError(f"{weights_dir} does not fit the task's layer {index}: {error}") from None
        layer.eval()
    if strange := sorted(tensors.keys() - wanted):
        raise ValueError(f"{weights_dir} holds {strange[0]}, which the task does not have")
    with torch.no_grad():
        return task.sample(layers)
