"""Encoder-decoder models of transformers: T5 with its shared relative positions, BART with two lists of layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bamboo_trainer.checkpoint.export import ExportForm, export
from bamboo_trainer.checkpoint.sources import WeightsFolder
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.models import huggingface
from bamboo_trainer.models.parts.seq2seq import SourcesAndTargets
from bamboo_trainer.models.parts.sequences import IGNORED
from bamboo_trainer.task import Weighted
from disturbed_jobs import disturbed_alike
from transformers_kit import layers_of, run, state_of, transformers

ENTRYPOINT = "bamboo_trainer.models.huggingface:build"
MODELS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    "bart": {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 32,
        "dropout": 0.0,
    },
}
BEGIN = {"t5": 0, "bart": 2}


def config_of(family: str, **data: Any) -> dict[str, Any]:
    architecture = {"model_type": family, "vocab_size": 40, **MODELS[family]}
    return {"architecture": architecture, "data": {"kind": "random", "length": 10, "samples": 32, **data}}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_loss_are_those_of_transformers(family: str, padding: bool) -> None:
    config = config_of(family, padding=padding)
    task = huggingface.build(config)
    layers = layers_of(task)
    given, targets = task.dataset.batch([0, 1, 2])
    found = run(layers, given)
    model: Any = huggingface.make_model(huggingface.published_config(huggingface.read_settings(config)), "seq2seq")
    missing = model.load_state_dict(state_of(layers), strict=False)
    assert not missing.unexpected_keys
    labels = targets[0]
    model.config.decoder_start_token_id, model.config.pad_token_id = BEGIN[family], model.config.pad_token_id or 0
    expected = model(input_ids=given[0], attention_mask=given[1], labels=labels)
    torch.testing.assert_close(found[0], expected.logits, rtol=1e-5, atol=1e-6)
    total = task.loss(found, targets)
    assert isinstance(total, Weighted)
    torch.testing.assert_close(total.total / total.weight, expected.loss)


@pytest.mark.parametrize("family", MODELS)
def test_an_export_is_read_by_transformers_and_trained_on(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    layers = layers_of(huggingface.build(config))
    kept, output = tmp_path / "weights", tmp_path / "model"
    kept.mkdir()
    state = {f"layers.{n}.{k}": t.clone() for n, layer in enumerate(layers) for k, t in layer.state_dict().items()}
    save_file(state, kept / "stage-000.safetensors")
    export(
        WeightsFolder(kept), ExportForm.HUGGINGFACE, output, force=False, progress=lambda *_: None, task_config=config
    )
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(output, local_files_only=True).eval()
    again = huggingface.build({"model": str(output), "data": config["data"]})
    given, _ = again.dataset.batch([3, 4])
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    expected = model(**dict(zip(names, given, strict=True))).logits
    for made in (layers, layers_of(again)):
        torch.testing.assert_close(run(made, given)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_losses_of_workers_change_no_bit(family: str) -> None:
    """While the rate goes up it does not depend on the number of steps: a checkpoint of a shorter job fits."""
    config = config_of(family, padding=True, trim=4) | {"learningRate": 0.01, "warmupSteps": 8}
    disturbed_alike({"entrypoint": ENTRYPOINT, "config": config})


def test_the_decoder_is_given_the_targets_one_place_later() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
    mask = (ids > 0).long()
    targets = torch.tensor([[7, 8, IGNORED, IGNORED], [7, 8, 9, IGNORED]])
    data = SourcesAndTargets(TensorDataset((ids, mask), (targets,)), 12, 2, 1)
    given, found = data.batch([0, 1])
    assert [part.tolist() for part in given] == [ids.tolist(), mask.tolist(), [[2, 7, 8, 1], [2, 7, 8, 9]]]
    assert found[0].tolist() == targets.tolist()


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        ([torch.zeros(3)], torch.zeros(3, 2), "expected tokens"),
        ([torch.zeros(3, 2)], torch.zeros(3), "expected tokens"),
        ([torch.full((3, 2), 40)], torch.zeros(3, 2), "token 40 is outside of the model's vocabulary of 40"),
        ([torch.zeros(3, 2)], torch.full((3, 2), 41), "token 41 is outside of the model's vocabulary of 40"),
    ],
)
def test_what_is_no_pair_is_refused(inputs: list[torch.Tensor], targets: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SourcesAndTargets(TensorDataset(tuple(inputs), (targets,)), 40, 0, 0).batch([0])
