"""The tokenizer in a model's folder, and data made with it: texts, and files of tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from bamboo_core.complaints import said_by
from bamboo_core.text import suggestion
from bamboo_trainer.data import TextDataset, dataset_from, text_bytes
from bamboo_trainer.data.tokenizing import BYTES, ByteEncoder
from bamboo_trainer.models.parts.sequences import check_tokens, whole_number
from bamboo_trainer.task import Dataset

TEXT: Final = "text"
TOKENS: Final = "tokens"
TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model", "bpe.codes"),
)
_KEYS: Final = ("path", "length", "tokenizer")


def has_tokenizer(folder: str) -> bool:
    """Return whether the folder has files of a tokenizer. Without any, transformers would make an empty one."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def open_tokenizer(folder: str, where: str) -> Any:
    """Return the tokenizer of transformers in that folder. where: the config's key, for messages. Raises ValueError."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ValueError(f"{where}.tokenizer: there is no folder {folder}")
    if not has_tokenizer(folder):
        raise ValueError(f"{where}.tokenizer: no tokenizer in {folder}, such as a tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}.tokenizer: no tokenizer in {folder}: {said_by(error)}") from None


def open_text(model: str | None, vocabulary: int, config: Mapping[str, Any], where: str) -> TextDataset:
    """Open a text as sequences of the tokens of the model's tokenizer, which are held in memory.

    model: its folder, if it has one. vocabulary: the size of the model's. config: {"path": see the kind "text" of
    `dataset_from`, "length", "tokenizer": "bytes", or a folder, by default the model's}. Raises ValueError.
    """
    if unknown := [key for key in config if key not in _KEYS]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, {suggestion(unknown[0], ['kind', *_KEYS])}")
    folder, path = config.get("tokenizer", model), config.get("path", "stdlib")
    if not isinstance(path, str):
        raise ValueError(f"{where}.path: expected stdlib or a file, got {path!r}")
    length = whole_number(config.get("length"), f"{where}.length")
    if folder == BYTES:
        found = dataset_from({"kind": TEXT, **{key: config[key] for key in config if key != "tokenizer"}}, where)
        assert isinstance(found, TextDataset)
        check_tokens(found.tokens, vocabulary, where)
        return found
    if folder is not None and not isinstance(folder, str):
        raise ValueError(f"{where}.tokenizer: expected the tokenizer's folder, or bytes, got {folder!r}")
    if folder is None or (folder == model and not has_tokenizer(folder)):
        missing = "the model has no folder" if folder is None else f"the model's folder {folder} has no tokenizer"
        raise ValueError(f"{where}.tokenizer: expected the tokenizer's folder, or bytes, since {missing}")
    tokenizer = open_tokenizer(folder, where)
    try:
        text = text_bytes(path).decode(errors="ignore" if path == "stdlib" else "strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}.path: {path} is not UTF-8: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    check_tokens(tokens, vocabulary, where)
    try:
        return TextDataset(tokens, length)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def open_tokens(model: str | None, config: Mapping[str, Any], where: str) -> Dataset:
    """Open files of tokens, like `dataset_from`. model: the folder whose weights training begins with.

    Raises ValueError for files of bytes if the model's tokenizer makes other tokens.
    """
    found = dataset_from({"kind": TOKENS, **config}, where)
    files: Any = getattr(found, "dataset", found)  # behind readers
    if model is None or files.vocabulary != ByteEncoder.vocabulary or not has_tokenizer(model):
        return found
    if len(open_tokenizer(model, where)) != ByteEncoder.vocabulary:
        raise ValueError(
            f"{where}.path: expected tokens of the tokenizer in {model}, got bytes: make them with "
            f"`bamboo tokenize --tokenizer {Path(model) / 'tokenizer.json'}`, or begin the model with random: true"
        )
    return found
