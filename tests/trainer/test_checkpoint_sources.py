"""Names of tensors in checkpoints and weights: their names in the split module, if any, else in the layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bamboo
import plain_models
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.export import export
from bamboo_trainer.checkpoint.sources import open_source
from export_kit import quiet, write
from from_module_kit import layers_of, run
from stage_kit import CONFIG, chain

A, B = torch.arange(3.0), torch.arange(4.0)


@pytest.mark.parametrize(
    ("kept", "names"),
    [
        ({"layers.0.module.a": A, "layers.1.module.b": B}, ["a", "b"]),
        ({"layers.0.module.a": A, "layers.1.module.a": A.clone(), "layers.1.module.b": B}, ["a", "b"]),
        ({"layers.0.module.a": A, "layers.1.module.a": A + 1}, ["layers.0.module.a", "layers.1.module.a"]),
        ({"layers.0.module.a": A, "layers.1.b": B}, ["layers.0.module.a", "layers.1.b"]),
    ],
    ids=["of one module", "tied, in two layers", "of a module in each layer", "of other layers"],
)
def test_a_tensor_has_the_name_of_the_split_module_if_there_is_one(
    kept: dict[str, Tensor], names: list[str], tmp_path: Path
) -> None:
    save_file(kept, tmp_path / "model.safetensors")
    found = bamboo.load(tmp_path)
    assert list(found) == names
    assert torch.equal(found[names[-1]], list(kept.values())[-1])
    exported = exported_to(tmp_path)
    for again in (load_file(exported), bamboo.load(exported)):
        assert again.keys() == found.keys()
        assert all(torch.equal(again[name], found[name]) for name in names)


def exported_to(kept: Path) -> Path:
    output = kept.with_name(f"{kept.name}-exported")
    export(open_source(str(kept), None)[0], output, force=False, progress=quiet)
    return output


READ: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "bamboo.load of the weights": bamboo.load,
    "safetensors": lambda kept: load_file(exported_to(kept)),
    "bamboo.load of the export": lambda kept: bamboo.load(exported_to(kept)),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
@pytest.mark.parametrize("name", ["dictionaries", "normed"])
def test_plain_torch_takes_what_was_kept_of_a_split_module(
    name: str, kind: str, read: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    """Plain PyTorch loads weights and checkpoints of a split module, also a tied head and BatchNorm's buffers."""
    task, kept = plain_models.build({"model": name}), tmp_path / "kept"
    layers = layers_of(task)
    if kind == "weights":
        kept.mkdir()
        state = {f"layers.{n}.{k}": t.clone() for n, layer in enumerate(layers) for k, t in layer.state_dict().items()}
        save_file(state, kept / "model.safetensors")
    else:
        write(CheckpointStore(str(kept)), chain(task, [(0, len(layers))], replace(CONFIG, seed=0)), 0)
    model: nn.Module = plain_models.parts(name)["make"]()
    model.load_state_dict(read(kept))
    for module in (*layers, model):
        module.eval()
    inputs, _ = task.dataset.batch([1, 2, 3])
    returned = model(*inputs)
    assert torch.equal(run(layers, inputs)[0], returned["logits"] if name == "dictionaries" else returned)
