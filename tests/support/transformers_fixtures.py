"""A published folder of a small model of transformers."""

from pathlib import Path

import pytest
import torch

from transformers_kit import FAMILIES, transformers


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of several files in bf16, with an index and a file named as a tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(3)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"])).to(torch.bfloat16)
    made.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "tokenizer.json").write_text("{}")
    return folder
