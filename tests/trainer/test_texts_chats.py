"""Conversations as training data: only answers are targets, with or without generation marks in the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_trainer.models import huggingface
from bamboo_trainer.models.sequences import IGNORED
from transformers_kit import FAMILIES, refused, transformers

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["<pad>", "<user>", "<assistant>", "<end>", *(f"w{n}" for n in range(40))]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>"
    "{% endgeneration %} {% else %}{{ m.content }} <end> {% endif %}{% endfor %}"
)
FORGETS = "{% for m in messages %}<{{ m.role }}> {% if loop.last %}{{ m.content }}{% else %}w0{% endif %} {% endfor %}"
CHATS = [
    [("user", "w1 w2"), ("assistant", "w3 w4"), ("user", "w5"), ("assistant", "w6")],
    [("user", "w7"), ("assistant", "w8")],
    [("user", "w9 w10 w11")],
    [("user", "w12"), ("assistant", "w13 w14 w15 w16 w17")],
]


def model(folder: Path, template: str | None = PLAIN) -> Path:
    known = {word: n for n, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"])).save_pretrained(folder)
    return folder


def file(folder: Path, chats: list[list[tuple[str, str]]] = CHATS) -> str:
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return str(folder / "chats.jsonl")


def config(folder: Path, template: str | None = PLAIN, **data: Any) -> dict[str, Any]:
    where = {"model": str(model(folder / "model", template)), "learningRate": 1e-3}
    return {**where, "data": {"kind": "chats", "path": file(folder), "length": 16, **data}}


def words(tokens: torch.Tensor) -> str:
    return " ".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_is_learned_are_the_answers_and_their_end(template: str, tmp_path: Path) -> None:
    dataset = huggingface.build(config(tmp_path, template)).dataset
    assert len(dataset) == 3, "one has no answer"
    (ids, mask), (targets,) = dataset.batch(range(3))
    assert [words(row[row != IGNORED]) for row in targets] == [
        "w3 w4 <end> w6 <end>",
        "w8 <end>",
        "w13 w14 w15 w16 w17 <end>",
    ]
    assert words(ids[1, mask[1].bool()]) == "<user> w7 <end> <assistant> w8"
    assert words(ids[0, targets[0] != IGNORED]) == "<assistant> w3 w4 <assistant> w6"


def test_packed_conversations_are_apart_and_none_is_cut_in_two(tmp_path: Path) -> None:
    (ids, positions), (targets,) = huggingface.build(config(tmp_path, packed=True, length=20)).dataset.batch([0, 1])
    assert words(ids[0]).startswith(
        "<user> w1 w2 <end> <assistant> w3 w4 <end> <user> w5 <end> <assistant> w6 <user> w7"
    )
    assert positions[0].tolist() == [*range(13), *range(5), *range(2)]
    assert words(ids[1, :9]) == "<user> w12 <end> <assistant> w13 w14 w15 w16 w17"
    assert (targets[1, 9:] == IGNORED).all()


def test_a_conversation_that_is_too_long_ends_where_the_sequence_does(tmp_path: Path) -> None:
    (ids, _), (targets,) = huggingface.build(config(tmp_path, length=6)).dataset.batch(range(3))
    assert words(ids[0]) == "<user> w1 w2 <end> <assistant> w3"
    assert words(targets[0][targets[0] != IGNORED]) == "w3 w4"


@pytest.mark.parametrize(
    ("template", "data", "said"),
    [
        (None, {}, "data: tokenizer: the tokenizer in"),
        (FORGETS, {}, "line 1: what the chat template writes of message 2 depends on what comes behind it"),
        ("{{ messages[0].content.missing() }}", {}, "line 1: the chat template does not take it"),
        (PLAIN, {"length": 1}, "has no answer (assistant) within 1 tokens"),
        (PLAIN, {"path": "/nowhere"}, "data: path: cannot read /nowhere"),
        (PLAIN, {"tokenizer": "/nowhere"}, "data: tokenizer: there is no folder /nowhere"),
        (PLAIN, {"tokeniser": "x"}, "data: unknown key 'tokeniser', did you mean tokenizer?"),
        (PLAIN, {"packed": 1}, "data: packed must be true or false, got 1"),
    ],
)
def test_what_cannot_be_is_told(template: str | None, data: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refused(config(tmp_path, template, **data))


@pytest.mark.parametrize("line", ["[]", "{", '{"messages": []}', '{"messages": [{"role": "user"}]}'])
def test_a_line_that_is_no_conversation_is_named(line: str, tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "chats.jsonl").write_text(f"\n{line}")
    assert 'chats.jsonl line 2: expected {"messages"' in refused(settings)
