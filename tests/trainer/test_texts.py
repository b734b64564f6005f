"""Heads of transformers' models: the same logits, losses and gradients; forms of labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bamboo_trainer.loading import load_task
from bamboo_trainer.models import huggingface
from bamboo_trainer.models.texts import label_accuracy
from bamboo_trainer.task import Weighted
from transformers_kit import (
    ENTRYPOINT,
    FAMILIES,
    LENGTH,
    check_as_transformers,
    headed,
    layers_of,
    objective_of,
    pair_of,
    run,
    state_of,
    transformers,
)

pytest_plugins = ["transformers_fixtures"]
HEADS = [
    ("bert", "sequence", True),
    ("bert", "token", True),
    ("bert", "choice", True),
    ("gpt2", "sequence", True),
    ("gpt2", "token", False),
    ("llama", "sequence", False),
    *(
        pytest.param(family, head, padding, marks=pytest.mark.slow)
        for family, head, padding in [
            ("qwen2", "sequence", True),
            ("qwen3", "token", True),
            ("modernbert", "sequence", True),
            ("modernbert", "token", True),
            ("modernbert", "choice", True),
            ("mistral", "sequence", True),
            ("mixtral", "token", True),
        ]
    ),
]


def npz(path: Path, **arrays: Any) -> dict[str, Any]:
    np.savez(path, **arrays)
    names = [name for name in arrays if name != "labels"]
    return {"kind": "npz", "path": str(path), "inputs": names, "targets": ["labels"]}


@pytest.mark.parametrize(("family", "objective", "padding"), HEADS)
def test_logits_losses_and_gradients_are_those_of_transformers(family: str, objective: str, padding: bool) -> None:
    labels = {} if objective == "choice" else {"labels": 5}
    check_as_transformers(headed(family, objective, data={"padding": padding}, **labels))


@pytest.mark.parametrize("labels", [1, 3])
def test_values_and_labels_that_hold_or_not_are_learned_as_transformers_does(labels: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (6, LENGTH), generator=draw)
    target = torch.rand(6, generator=draw) if labels == 1 else (torch.rand(6, labels, generator=draw) > 0.5).float()
    kinds = torch.arange(LENGTH).expand(6, -1) // 7
    data = npz(tmp_path / "x.npz", ids=ids, mask=torch.ones_like(ids), kinds=kinds, labels=target)
    config = headed("bert", "sequence", labels=labels) | {"data": data}
    task, layers, model = pair_of(config)
    inputs, (wanted,) = task.dataset.batch(range(6))
    (logits,) = run(layers, inputs)
    output = model(ids, torch.ones_like(ids), kinds, labels=target)
    assert torch.equal(logits, output.logits)
    weighted = task.loss((logits,), (wanted,))
    assert isinstance(weighted, Weighted)
    torch.testing.assert_close(weighted.total / weighted.weight, output.loss)
    right, of = label_accuracy((logits,), (wanted,))
    assert 0 <= right <= of == 6 * labels


def test_a_published_model_gets_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The task keeps the published values of the body, and reads its own head again under the published names."""
    published = transformers.BertConfig(**FAMILIES["bert"])
    transformers.BertForMaskedLM(published).save_pretrained(tmp_path)
    names = ["PER", "ORG", "O"]
    with caplog.at_level("INFO"):
        task = huggingface.build({"model": str(tmp_path), "objective": "token", "labels": names})
    assert "has no such tensors: classifier.weight, classifier.bias" in caplog.text
    kept = transformers.BertForMaskedLM.from_pretrained(tmp_path).state_dict()
    own = state_of(layers_of(task))
    assert all(torch.equal(own[name], kept[name]) for name in own if name.startswith("bert."))
    headed = transformers.BertForTokenClassification(
        transformers.BertConfig(**FAMILIES["bert"], id2label=dict(enumerate(names)))
    )
    headed.save_pretrained(tmp_path / "tagger")
    assert objective_of({"model": str(tmp_path / "tagger")}) == "token"
    again = state_of(layers_of(huggingface.build({"model": str(tmp_path / "tagger")})))
    assert torch.equal(again["classifier.weight"], headed.classifier.weight)


IDS = np.ones((4, 5), np.int64)


@pytest.mark.parametrize(
    ("objective", "arrays", "said"),
    [
        ("sequence", {"ids": IDS, "labels": np.array([0, 1, 2, 1])}, "data: expected labels below 2, or -100, got 2"),
        ("sequence", {"ids": IDS, "labels": np.zeros((4, 5), int)}, "data: expected labels of shape [1], got [1, 5]"),
        ("sequence", {"ids": IDS, "labels": np.zeros((4, 3), np.float32)}, "expected 2 values a sample, got [1, 3]"),
        ("token", {"ids": IDS, "labels": np.zeros(4, int)}, "data: expected labels of shape [1, 5], got [1]"),
        ("token", {"ids": IDS, "labels": np.zeros((4, 5), np.float32)}, "expected whole numbers as labels"),
        ("choice", {"ids": IDS, "labels": np.zeros(4, int)}, "data: expected tokens [samples, choices, length], perh"),
        ("token", {"ids": IDS + 99, "labels": np.zeros((4, 5), int)}, "token 100 is outside of the model's vocabulary"),
    ],
)
def test_data_that_cannot_be_are_refused(objective: str, arrays: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = headed("bert", objective) | {"data": npz(tmp_path / "x.npz", **arrays)}
    with pytest.raises(ValueError, match="data: ") as refused:
        load_task(ENTRYPOINT, config).dataset.batch(range(4))
    assert said in str(refused.value)
