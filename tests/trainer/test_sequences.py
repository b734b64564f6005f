"""Packed sequences of several documents, and data whose labels are not shifted yet."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bamboo_trainer.models import huggingface
from bamboo_trainer.models.sequences import IGNORED, positions_in
from bamboo_trainer.task import Weighted
from from_module_kit import check_gradients
from token_file_kit import tokenized
from transformers_kit import LENGTH, config_of, pair_of, refused, run

PACKS = sorted(huggingface.PACKS)
QUICK = ("gpt2", "llama")


def packed(folder: Path) -> dict[str, Any]:
    """Write documents, some of which are longer than a sequence. Return the config of the data."""
    text = folder / "text.txt"
    lines = ["a bee", "it", "x" * 5, "one document that is longer than a whole sequence of it", "and", "so on"] * 12
    text.write_text("\n".join(lines))
    tokenized(text, output=folder / "text.tokens", document="line")
    return {"kind": "tokens", "path": str(folder / "text.tokens"), "length": LENGTH, "documents": "numbered"}


def config(family: str, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = config_of(family, **more) | {"data": data}
    found["architecture"]["vocab_size"] = 256
    return found


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "sdpa") for family in QUICK),
        *(pytest.param(family, "sdpa", marks=pytest.mark.slow) for family in PACKS if family not in QUICK),
        *(pytest.param(family, "eager", marks=pytest.mark.slow) for family in PACKS),
    ],
)
def test_a_document_knows_nothing_of_those_beside_it(family: str, attention: str, tmp_path: Path) -> None:
    """A packed document's logits are those of transformers, given either the same positions or the document alone."""
    settings = config(family, packed(tmp_path), attention=attention)
    task, layers, model = pair_of(settings)
    (ids, positions), (labels,) = task.dataset.batch([0, 1, 2, 3])
    (logits,) = run(layers, (ids, positions))
    theirs = model(input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, use_cache=False)
    assert torch.equal(logits, theirs.logits)
    weighted = task.loss((logits,), (labels,))
    assert isinstance(weighted, Weighted)
    (weighted.total / weighted.weight).backward()
    theirs.loss.backward()
    check_gradients(layers, model)
    begins = [[n for n in range(LENGTH) if not row[n]] for row in positions.tolist()]
    assert max(map(len, begins)) > 1
    for row, starts in enumerate(begins):
        for first, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            alone = model(input_ids=ids[row : row + 1, first:end], use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, first:end], alone, rtol=1e-4, atol=1e-5)
    (whole,) = run(layers, (ids[:1], torch.arange(LENGTH)[None]))
    torch.testing.assert_close(whole, model(input_ids=ids[:1]).logits, msg="one document needs no other way")


def test_the_first_token_of_a_document_is_no_target(tmp_path: Path) -> None:
    (_, positions), (labels,) = huggingface.build(config("gpt2", packed(tmp_path))).dataset.batch(range(8))
    assert (labels[:, :-1][positions[:, 1:] == 0] == IGNORED).all()
    assert (labels[:, :-1][positions[:, 1:] != 0] != IGNORED).all()


def test_labels_that_are_not_shifted_give_the_loss_of_transformers(tmp_path: Path) -> None:
    mask = (np.arange(LENGTH) < np.array([3, 4, 9, 12])[:, None]).astype(np.int64)
    ids = np.random.default_rng(1).integers(1, 64, mask.shape) * mask
    np.savez(tmp_path / "x.npz", ids=ids, mask=mask, labels=np.where(mask, ids, IGNORED))
    data = {"kind": "npz", "path": str(tmp_path / "x.npz"), "inputs": ["ids", "mask"], "targets": ["labels"]}
    task, layers, model = pair_of(config("gpt2", {**data, "shift": True}))
    inputs, targets = task.dataset.batch(range(4))
    weighted = task.loss(run(layers, inputs), targets)
    assert isinstance(weighted, Weighted)
    labels = torch.from_numpy(np.where(mask, ids, IGNORED))
    theirs = model(input_ids=inputs[0], attention_mask=inputs[1], labels=labels)
    torch.testing.assert_close(weighted.total / weighted.weight, theirs.loss)


def test_positions_begin_again_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    assert positions_in(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("family", ["bert", "bloom"])
def test_models_that_cannot_tell_documents_apart_are_refused(family: str, tmp_path: Path) -> None:
    told = refused(config(family, packed(tmp_path)))
    assert "data.documents: numbered is not for language models of this kind" in told
