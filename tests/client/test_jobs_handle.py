"""What a handle writes of a job's weights, other programs read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bamboo.jobs.handle import JobHandle
from bamboo_trainer.models import huggingface
from from_module_kit import layers_of

CONFIG = {"architecture": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}}


class Ended:
    """A job that has ended, as far as an export asks."""

    name = "ended"

    def __init__(self, weights: Path) -> None:
        self._weights = weights

    def weights_place(self) -> str:
        return str(self._weights)

    def task_config(self) -> Mapping[str, Any]:
        return CONFIG


@pytest.mark.slow
def test_transformers_loads_what_a_handle_exports(tmp_path: Path) -> None:
    """The handle knows which model the job has trained."""
    transformers = pytest.importorskip("transformers")
    task, kept = huggingface.build(CONFIG), tmp_path / "weights"
    kept.mkdir()
    layers = enumerate(layers_of(task))
    state = {f"layers.{n}.{name}": t.clone() for n, layer in layers for name, t in layer.state_dict().items()}
    save_file(state, kept / "stage-000.safetensors")
    handle: Any = JobHandle(Ended(kept))  # type: ignore[arg-type]
    out = handle.export(tmp_path / "out", "huggingface")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    trained = handle.weights()
    assert trained.keys() <= model.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in trained.items())
