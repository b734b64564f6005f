"""Weights in memory have the names that their module gives them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import bamboo

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
    save_file(kept, tmp_path / "stage-000.safetensors")
    found = bamboo.load(tmp_path)
    assert list(found) == names
    assert torch.equal(found[names[-1]], list(kept.values())[-1])
