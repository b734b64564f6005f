"""The key `generation` of a language model's config: what `training.generation` has it continue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_core.complaints import said_by
from bamboo_trainer.task import Parts, TextGeneration

BYTES: Final = "bytes"  # the tokenizer whose tokens are the bytes of UTF-8
TOKENS: Final = 32
_KEYS: Final = ("prompts", "tokens", "temperature", "tokenizer")
_WHERE: Final = "generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How texts become tokens and tokens texts. end: the token with which a text ends, if there is one."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int | None = None
    padding: int = 0


def open_generation(
    config: Mapping[str, Any] | None,
    tokenizer: str | None,
    words: int,
    most: int | None = None,
    names: Sequence[str] = ("input_ids",),
) -> TextGeneration | None:
    """None without a config. Raises ValueError, naming the key and what was expected.

    config: {"prompts": texts, or lists of token ids, "tokens": 32, "temperature": 0, "tokenizer": its folder, or
    "bytes"}. tokenizer: that of the model, if the config names none. words: size of the model's vocabulary. most:
    tokens of a sequence; None: any number. names: of the model's inputs, as transformers calls them.
    """
    if config is None:
        return None
    if unknown := [key for key in config if key not in _KEYS]:
        raise ValueError(f"{_WHERE}: unknown key {unknown[0]!r}, expected some of {', '.join(_KEYS)}")
    prompts, tokens = config.get("prompts"), config.get("tokens", TOKENS)
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(f"{_WHERE}.prompts: expected a list of texts, or of lists of token ids, got {prompts!r}")
    said = config.get("tokenizer", tokenizer)
    if not (said is None or isinstance(said, str)):
        raise ValueError(f"{_WHERE}.tokenizer: expected a tokenizer's folder, or {BYTES}, got {said!r}")
    are_texts = all(isinstance(prompt, str) for prompt in prompts)
    by_number = said is None or (not are_texts and "tokenizer" not in config)
    vocabulary = _by_number() if by_number else _vocabulary(str(said))
    ids = [_ids(prompt, vocabulary, words, number) for number, prompt in enumerate(prompts)]
    length = max(map(len, ids)) + (tokens if type(tokens) is int else 0)
    if most is not None and length > most:
        raise ValueError(
            f"{_WHERE}: expected prompts and their new tokens of at most {most} tokens together, got {length}"
        )
    return TextGeneration(
        prompts=ids,
        tokens=tokens,
        decode=vocabulary.decode,
        temperature=config.get("temperature", 0.0),
        end=vocabulary.end,
        padding=vocabulary.padding,
        inputs=_Inputs(tuple(names)),
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The model's inputs by name. What is behind a sequence so far is not told apart: nothing before it looks there."""

    names: tuple[str, ...]

    def __call__(self, tokens: Tensor) -> Parts:
        made: dict[str, Tensor] = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).contiguous(),
        }
        return tuple(made[name] for name in self.names)


def _ids(prompt: Any, vocabulary: Vocabulary, words: int, number: int) -> list[int]:
    where = f"{_WHERE}.prompts[{number}]"
    if isinstance(prompt, str):
        found = vocabulary.encode(prompt)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        found = list(prompt)
    else:
        raise ValueError(f"{where}: expected a text, or a list of token ids, got {prompt!r}")
    if not found:
        raise ValueError(f"{where}: expected at least one token")
    if wrong := [token for token in found if not 0 <= token < words]:
        raise ValueError(f"{where}: token {wrong[0]} is outside of the model's vocabulary of {words}")
    return found


def _by_number() -> Vocabulary:
    """Tokens of which nobody has said what they stand for."""

    def encode(text: str) -> list[int]:
        raise ValueError(f"{_WHERE}.tokenizer: expected a tokenizer's folder, as the prompt {text!r} is a text")

    return Vocabulary(encode=encode, decode=lambda tokens: " ".join(map(str, tokens)))


def _vocabulary(tokenizer: str) -> Vocabulary:
    if tokenizer == BYTES:
        return Vocabulary(
            encode=lambda text: list(text.encode()),
            decode=lambda tokens: b"".join(bytes([one]) for one in tokens if one < 256).decode("utf-8", "replace"),
        )
    if not Path(tokenizer).is_dir():
        raise ValueError(f"{_WHERE}.tokenizer: there is no folder {tokenizer}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(
            f"{_WHERE}.tokenizer: the library transformers is not installed: pip install 'bamboo-trainer[huggingface]'"
        ) from None
    try:
        found: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"{_WHERE}.tokenizer: no tokenizer in {tokenizer}: {said_by(error)}") from None
    end, padding = found.eos_token_id, found.pad_token_id
    return Vocabulary(
        encode=lambda text: list(found(text)["input_ids"]),
        decode=lambda tokens: str(found.decode(tokens, skip_special_tokens=True)),
        end=None if end is None else int(end),
        padding=int(padding) if padding is not None else int(end or 0),
    )
