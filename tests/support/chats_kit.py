"""A small model with a tokenizer of whole words and a chat template."""

from pathlib import Path

import pytest
import torch

from transformers_kit import FAMILIES, transformers

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


def saved_model(folder: Path, template: str | None = PLAIN) -> Path:
    known = {word: n for n, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"])).save_pretrained(folder)
    return folder


def words(tokens: torch.Tensor) -> str:
    return " ".join(WORDS[token] for token in tokens)
