"""Tokenizers of texts: the model's own, another one that the config names, or bytes if the config asks for them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_trainer.data.tokenizing import ByteEncoder, Encoder, Texts, TokenizerEncoder, tokenize
from bamboo_trainer.models import huggingface
from transformers_kit import FAMILIES, transformers

tokenizers = pytest.importorskip("tokenizers")
TEXT = "to be or not to be that is the question " * 40
WORDS = ["<pad>", *dict.fromkeys(TEXT.split())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a model's weights and a tokenizer that cuts texts into words."""
    folder = tmp_path_factory.mktemp("model")
    known = {word: n for n, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return without_tokenizer(folder)


def without_tokenizer(folder: Path, **sizes: int) -> Path:
    torch.manual_seed(1)
    config = transformers.GPT2Config(**{**FAMILIES["gpt2"], "vocab_size": 300, **sizes})
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def inputs(config: dict[str, Any]) -> torch.Tensor:
    return huggingface.build(config).dataset.batch([0])[0][0][0]


def test_a_text_is_cut_by_the_tokenizer_of_the_models_folder(model: Path, text: str) -> None:
    """The tokenizer in the model's folder also tokenizes the texts of a mixture and of an evaluation."""
    data = {"kind": "text", "path": text, "length": 8}
    expected = [WORDS.index(word) for word in TEXT.split()[:8]]
    task = huggingface.build({"model": str(model), "data": data, "evaluation": data})
    assert task.dataset.batch([0])[0][0][0].tolist() == expected
    assert task.evaluation is not None
    assert task.evaluation.dataset.batch([0])[0][0][0].tolist() == expected
    mixed = {"kind": "mixture", "sources": [{"weight": 1, **data}, {"weight": 1, **data}]}
    assert inputs({"model": str(model), "data": mixed}).tolist() == expected


def test_bytes_have_to_be_asked_for(model: Path, text: str, tmp_path: Path) -> None:
    data = {"kind": "text", "path": text, "length": 8, "tokenizer": "bytes"}
    evaluation = {"kind": "text", "path": text}
    task = huggingface.build({"model": str(model), "data": data, "evaluation": evaluation})
    assert bytes(task.dataset.batch([0])[0][0][0].tolist()) == TEXT[:8].encode()
    assert task.evaluation is not None
    assert bytes(task.evaluation.dataset.batch([0])[0][0][0].tolist()) == TEXT[:8].encode()
    plain = without_tokenizer(tmp_path / "plain")
    assert len(inputs({"model": str(plain), "data": data})) == 8


def test_another_tokenizer_may_be_named(model: Path, text: str, tmp_path: Path) -> None:
    data = {"kind": "text", "path": text, "length": 4, "tokenizer": str(model)}
    plain = without_tokenizer(tmp_path / "plain")
    assert inputs({"model": str(plain), "data": data}).tolist() == [WORDS.index(word) for word in TEXT.split()[:4]]


@pytest.mark.parametrize(
    ("data", "sizes", "said"),
    [
        ({}, {}, r"data: tokenizer: expected the tokenizer's folder, or bytes, since the model's folder .* has no"),
        ({"tokenizer": "bytes"}, {"vocab_size": 100}, "data: token 117 is outside of the model's vocabulary of 100"),
        ({"tokenizer": "MODEL"}, {"vocab_size": 5}, "data: token 8 is outside of the model's vocabulary of 5"),
        ({"tokenizer": "/nowhere"}, {}, "data: tokenizer: there is no folder /nowhere"),
        ({"tokenizer": 3}, {}, "data: tokenizer must be a text or null, got 3"),
        ({"tokenizer": "MODEL", "path": "/gone"}, {}, "data: path must be stdlib or a readable file, got '/gone'"),
        ({"tokenizer": "MODEL", "length": 9999}, {}, "data: the text has 400 tokens, fewer than context"),
        ({"lenght": 8}, {}, "data: unknown key 'lenght', did you mean length?"),
    ],
)
def test_what_cannot_be_is_refused(
    data: dict[str, Any], sizes: dict[str, int], said: str, model: Path, text: str, tmp_path: Path
) -> None:
    plain = without_tokenizer(tmp_path / "plain", bos_token_id=0, eos_token_id=0, **sizes)
    given = {"path": text, "length": 8, **data}
    given = {"kind": "text", **{key: str(model) if value == "MODEL" else value for key, value in given.items()}}
    with pytest.raises(ValueError, match=said):
        huggingface.build({"model": str(plain), "data": given})


def test_an_architecture_has_no_tokenizer(text: str) -> None:
    config = {"architecture": {"model_type": "gpt2", **FAMILIES["gpt2"]}, "data": {"kind": "text", "length": 8}}
    with pytest.raises(ValueError, match=r"data: tokenizer: .* since the model has no folder"):
        huggingface.build(config)


def test_files_of_bytes_are_refused_for_weights_that_know_other_tokens(model: Path, text: str, tmp_path: Path) -> None:
    def tokens(name: str, encoder: Encoder) -> dict[str, Any]:
        tokenize(Texts(files=[Path(text)]), encoder, tmp_path / name)
        return {"kind": "tokens", "path": str(tmp_path / name), "length": 8}

    raw = tokens("bytes.tokens", ByteEncoder())
    for data in (raw, {**raw, "readers": 1}):
        with pytest.raises(ValueError, match=r"data: path: expected tokens of the tokenizer in .*, got bytes"):
            huggingface.build({"model": str(model), "data": data})
    assert len(inputs({"model": str(model), "random": True, "data": raw})) == 8
    words = tokens("words.tokens", TokenizerEncoder(model / "tokenizer.json"))
    assert inputs({"model": str(model), "data": words}).tolist() == [WORDS.index(w) for w in TEXT.split()[:8]]
