"""Split models of transformers: logits, losses and gradients equal to transformers', and refused configs."""

import logging
import re
from typing import Any

import pytest
import torch

from bamboo_trainer.models import huggingface
from folders import ROOT
from transformers_kit import (
    FAMILIES,
    LENGTH,
    WORDS,
    check_as_transformers,
    config_of,
    layers_of,
    pair_of,
    refused,
    run,
    transformers,
)

pytest_plugins = ["transformers_kit"]


FIRST = ("gpt2", "llama", "qwen2", "qwen3", "bert")


LOGITS = [
    *((family, "sdpa", True) for family in FIRST),
    *(pytest.param(f, "eager", True, marks=pytest.mark.slow) for f in FAMILIES if f not in FIRST),
    *(pytest.param(f, "sdpa", True, marks=pytest.mark.slow) for f in FAMILIES if f not in (*FIRST, "bloom", "mamba2")),
    *((family, "sdpa", False) for family in ("gpt2", "bert")),
    *((family, "eager", True) for family in ("qwen2", "bert")),
]


@pytest.mark.parametrize(("family", "attention", "padding"), LOGITS)
def test_logits_losses_and_gradients_are_those_of_transformers(family: str, attention: str, padding: bool) -> None:
    check_as_transformers(config_of(family, attention=attention, data={"padding": padding}))


def test_the_page_has_what_each_family_was_compared_in() -> None:
    """docs/huggingface.md lists each compared family. `make architectures`, too slow for a test, writes the table."""
    page = (ROOT / "docs" / "huggingface.md").read_text()
    rows = {row.split("`")[1]: row.split("|")[-2].strip() for row in page.splitlines() if row.startswith("| `")}
    assert {family: rows.get(family) for family in FAMILIES} == dict.fromkeys(FAMILIES, "yes")


def test_what_is_tried_without_values_fails_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """A failed trial without values shows no logs of torch, which would have a traceback for each block of experts."""
    noted: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = noted.append  # type: ignore[method-assign]
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "bamboo_trainer"):
            huggingface.build(config_of("mixtral"))
    finally:
        torchs.removeHandler(handler)
    assert "is run with values" in caplog.text
    assert noted == []


@pytest.mark.parametrize("family", ["mamba2", "gpt2"])
def test_a_microbatch_without_padding_goes_the_way_of_all_others(family: str) -> None:
    """Logits equal transformers', with or without a mask that masks nothing; transformers leaves out such a mask."""
    for padding in (True, False):
        _, layers, model = pair_of(config_of(family, data={"padding": padding}))
        ids = torch.arange(2 * LENGTH).reshape(2, LENGTH)
        (logits,) = run(layers, (ids, torch.ones_like(ids)) if padding else (ids,))
        torch.testing.assert_close(logits, model(ids).logits)


def test_masked_tokens_are_chosen_by_the_sample() -> None:
    task = huggingface.build(config_of("bert", data={"padding": True, "length": 400}))
    (ids, mask), (labels,) = task.dataset.batch(range(20))
    (again, _), (targets,) = task.dataset.batch([7])
    assert torch.equal(ids[7:8], again)
    assert torch.equal(labels[7:8], targets)
    chosen = labels != -100
    assert not (chosen & ~mask.bool()).any()
    assert 0.12 < chosen.sum() / mask.sum() < 0.18
    assert 0.7 < (ids[chosen] == huggingface.mask_token(transformers.BertConfig(vocab_size=WORDS))).float().mean() < 0.9


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "expected one of model and architecture"),
        ({"architecture": "gpt2", "model": "x"}, "expected one of model and architecture"),
        ({"modell": "x"}, "unknown key 'modell', did you mean model?"),
        ({"lr": 1}, "unknown key 'lr', expected some of model, revision,"),
        ({"model": "/nowhere"}, "model: there is no folder /nowhere"),
        ({"model": "/tmp"}, "model: /tmp has no config.json, as save_pretrained writes it"),
        ({"architecture": "gpt2", "revision": "0" * 40}, "revision: expected only with an id on the Hub as model"),
        (
            {"model": "/tmp", "revision": "0" * 40},
            "revision: expected only with an id on the Hub as model, got the folder",
        ),
        ({"architecture": {"n_layer": 2}}, "architecture must have a model_type, such as gpt2"),
        ({"architecture": "no-such"}, "architecture: "),
        (
            {"architecture": {"model_type": "llama", "hiden_size": 64}},
            "architecture: unknown key 'hiden_size', did you mean hidden_size?",
        ),
        ({"architecture": "t5"}, "t5 is no causal or masked language model of transformers; from_module splits others"),
        ({"architecture": "bart"}, "bart is no causal or masked language model of transformers; from_module splits"),
        (
            config_of("gpt2", objective="both"),
            "objective must be one of causal, masked or null, got 'both'",
        ),
        (config_of("gpt2", attention="flash"), "attention must be one of sdpa, eager or null, got 'flash'"),
        (config_of("mixtral", routerAuxLossCoef=-1), "routerAuxLossCoef must be at least 0, got -1"),
        (config_of("gpt2", learningRate=0), "learningRate must be positive, got 0.0"),
        (
            config_of("gpt2", data={"kind": "txt"}),
            "data.kind must be one of tokens, text, npz, huggingface, own, mixture, random, chats, got 'txt'",
        ),
        (config_of("gpt2", data={"lenght": 3}), "data: unknown key 'lenght', did you mean length?"),
        (
            {"architecture": {"model_type": "eurobert", "vocab_size": 64}},
            "mask_token_id must be a token below vocab_size",
        ),
        (config_of("gpt2", blocks="h"), "blocks: the model has no 'h'"),
        (config_of("gpt2", objective="masked"), "objective: transformers has no ForMaskedLM of gpt2"),
        (config_of("gpt2", evaluation={"padding": True}), "evaluation: expected a mask of those that count just if"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    assert said in refused(config)


def test_a_config_names_the_data_to_evaluate() -> None:
    task = huggingface.build(config_of("gpt2", evaluation={"samples": 6}))
    assert task.evaluation is not None
    inputs, _ = task.evaluation.dataset.batch(range(6))
    assert inputs[0].shape == (6, LENGTH), "the length is that of the data"
    assert not torch.equal(inputs[0], task.dataset.batch(range(6))[0][0])


NARROW = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
LONGEST = [
    ({"model_type": "gpt2", "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}, 20),
    ({"model_type": "bert", "max_position_embeddings": 20, **NARROW}, 20),
    ({"model_type": "roberta", "max_position_embeddings": 20, "pad_token_id": 1, **NARROW}, 18),
    ({"model_type": "opt", "max_position_embeddings": 20, "ffn_dim": 24, "word_embed_proj_dim": 16, **NARROW}, 20),
    ({"model_type": "mpt", "max_seq_len": 20, "d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 64}, 20),
    ({"model_type": "llama", "max_position_embeddings": 20, **NARROW}, None),
]


@pytest.mark.parametrize(("architecture", "longest"), LONGEST)
def test_sequences_longer_than_the_models_positions_are_refused_with_both_numbers(
    architecture: dict[str, Any], longest: int | None
) -> None:
    """Sequences may be as long as the model has positions. Rotary positions have no limit."""
    fits = huggingface.build({"architecture": architecture, "data": {"length": longest or 24, "samples": 4}})
    inputs, _ = fits.dataset.batch([0, 1])
    run(layers_of(fits), inputs)
    if longest is None:
        return
    said = rf"data: expected sequences of at most {longest} tokens, .* \({architecture['model_type']}\) .* got 21"
    assert re.search(said, refused({"architecture": architecture, "data": {"length": 21, "samples": 4}}))
    evaluated = {"data": {"length": 8, "samples": 4}, "evaluation": {"length": 21, "samples": 4}}
    told = refused({"architecture": architecture, **evaluated})
    assert f"evaluation: expected sequences of at most {longest} tokens" in told
