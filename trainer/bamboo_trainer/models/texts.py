"""Data for models of transformers: tokenized texts, and conversations (chat templates)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from bamboo_core.complaints import said_by
from bamboo_trainer.data import Documents, TensorDataset, TextDataset, text_bytes
from bamboo_trainer.data import config as data_config
from bamboo_trainer.data.tokenizing import BYTES, ByteEncoder
from bamboo_trainer.models.sequences import IGNORED, check_tokens, whole_numbers
from bamboo_trainer.task import Dataset

TEXT: Final = "text"
TOKENS: Final = "tokens"
TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model", "bpe.codes"),
)


def has_tokenizer(folder: str) -> bool:
    """Return whether the folder has a tokenizer file. Without any, transformers would make an empty tokenizer."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def open_tokenizer(folder: str) -> Any:
    """Return the transformers tokenizer that a folder holds, without accessing the Hub. Raises ValueError."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ValueError(f"tokenizer: there is no folder {folder}")
    if not has_tokenizer(folder):
        raise ValueError(f"tokenizer: no tokenizer in {folder}, such as a tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer: no tokenizer in {folder}: {said_by(error)}") from None


def open_text(
    model: str | None, vocabulary: int, *, length: int, path: str = "stdlib", tokenizer: str | None = None
) -> TextDataset:
    """Tokenize a text with the model's tokenizer, and return it as a dataset of sequences in memory.

    model: the model's folder, if any. vocabulary: size of the model's vocabulary. path: see `text_bytes`. tokenizer:
    "bytes", or a folder, by default the model's. Raises ValueError.
    """
    folder = model if tokenizer is None else tokenizer
    if folder == BYTES:
        found = data_config.open_text(path=path, length=length)
        check_tokens(found.tokens, vocabulary)
        return found
    if folder is None or (folder == model and not has_tokenizer(folder)):
        missing = "the model has no folder" if folder is None else f"the model's folder {folder} has no tokenizer"
        raise ValueError(f"tokenizer: expected the tokenizer's folder, or bytes, since {missing}")
    opened = open_tokenizer(folder)
    try:
        text = text_bytes(path).decode(errors="ignore" if path == "stdlib" else "strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"path: {path} is not UTF-8: {error}") from None
    tokens = torch.tensor(opened(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    check_tokens(tokens, vocabulary)
    return TextDataset(tokens, length)


def open_tokens(model: str, *, path: str, length: int, documents: str = Documents.JOINED) -> Dataset:
    """Open files of tokens: the kind "tokens" of `dataset_from`. model: the folder whose weights training begins with.

    Raises ValueError, also if the files hold bytes but the model's tokenizer makes other tokens; StorageError.
    """
    found = data_config.open_tokens(path=path, length=length, documents=documents)
    if found.vocabulary != ByteEncoder.vocabulary or not has_tokenizer(model):
        return found
    if len(open_tokenizer(model)) != ByteEncoder.vocabulary:
        raise ValueError(
            f"path: expected tokens of the tokenizer in {model}, got bytes: make them with "
            f"`bamboo tokenize --tokenizer {Path(model) / 'tokenizer.json'}`, or begin the model with random: true"
        )
    return found


KIND: Final = "chats"
ANSWERS: Final = "assistant"  # the role whose messages are learned
_MARKS_ANSWERS: Final = "generation"  # the block by which a template marks an answer


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. ids: its tokens. answers: for each token, whether it belongs to an answer."""

    ids: Sequence[int]
    answers: Sequence[bool]

    @property
    def targets(self) -> list[int]:
        """The target of each token but the last: the next token if that belongs to an answer, else IGNORED."""
        follows = pairwise(zip(self.ids, self.answers, strict=True))
        return [token if learned else IGNORED for _, (token, learned) in follows]


def open_chats(
    model: str | None, vocabulary: int, *, path: str, length: int, packed: bool = False, tokenizer: str | None = None
) -> TensorDataset:
    """Tokenize conversations for training on their answers, and return them as a dataset in memory. Conversations are
    cut after `length` tokens; conversations that then have no answer are left out.

    Inputs: int64 [samples, length], and a mask of the tokens that count or, if packed, the number of each token's
    conversation. Targets: int64 [samples, length], the next token if it belongs to an answer, else -100. model: the
    model's folder, if any. vocabulary: size of the model's vocabulary. path: a file with a JSON object {"messages":
    [{"role", "content"}, ...]} in each line. tokenizer: a folder, by default the model's. Raises ValueError.
    """
    folder = model if tokenizer is None else tokenizer
    if folder is None:
        raise ValueError("tokenizer: expected the tokenizer's folder")
    whole_numbers({"length": length}, "length")
    template = ChatTemplate(folder)
    chats = [template.chat(messages, place) for place, messages in _conversations(Path(path))]
    rows = [(chat.ids[:-1][:length], chat.targets[:length]) for chat in chats]
    rows = [row for row in rows if any(target != IGNORED for target in row[1])]
    if not rows:
        raise ValueError(f"{path} has no answer ({ANSWERS}) within {length} tokens")
    check_tokens(torch.tensor([token for tokens, _ in rows for token in tokens]), vocabulary)
    return _packed(rows, length, template.padding) if packed else _padded(rows, length, template.padding)


class ChatTemplate:
    """The chat template of a folder's tokenizer, which turns conversations into tokens. Raises ValueError."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = open_tokenizer(folder)
        if not isinstance(self._tokenizer.chat_template, str):
            raise ValueError(f"tokenizer: the tokenizer in {folder} has no chat template, or several")
        blocks = self._tokenizer.chat_template.replace("{%-", "{%").split("{%")[1:]
        self._marks_answers = any(block.split()[:1] == [_MARKS_ANSWERS] for block in blocks)

    @property
    def padding(self) -> int:
        """The id of the token that pads sequences; 0 if the tokenizer has none."""
        found = self._tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def chat(self, messages: Sequence[Any], place: str) -> Chat:
        """Tokenize a conversation, and mark its answers. place: its file and line, which begin a ValueError's text."""
        try:
            return self._marked(messages) if self._marks_answers else self._compared(messages, place)
        except Exception as error:  # a template may raise anything
            if isinstance(error, _Unstable):
                raise
            raise ValueError(f"{place}: the chat template does not take it: {said_by(error)}") from None

    def _marked(self, messages: Sequence[Any]) -> Chat:
        found = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return Chat(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])

    def _compared(self, messages: Sequence[Any], place: str) -> Chat:
        """Tokenize a conversation, for a template that does not mark answers. An answer's tokens are what its message
        adds after the generation prompt. Raises _Unstable.
        """
        ids = self._tokens(messages)
        answers = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            asked, answered = self._tokens(messages[:number], asks=True), self._tokens(messages[: number + 1])
            if ids[: len(answered)] != answered or answered[: len(asked)] != asked:
                raise _Unstable(
                    f"{place}: what the chat template writes of message {number + 1} depends on what "
                    f"comes behind it; mark answers in the template by {{% {_MARKS_ANSWERS} %}}"
                )
            answers[len(asked) : len(answered)] = [True] * (len(answered) - len(asked))
        return Chat(ids, answers)

    def _tokens(self, messages: Sequence[Any], *, asks: bool = False) -> list[int]:
        found = self._tokenizer.apply_chat_template(messages, return_dict=True, add_generation_prompt=asks)
        return list(found["input_ids"])


class _Unstable(ValueError):
    """Error because later messages change how earlier ones are rendered, or an answer lacks the generation prompt."""


def _conversations(path: Path) -> Iterator[tuple[str, list[Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"path: cannot read {path}: {said_by(error)}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            good = isinstance(messages, list) and all({"role", "content"} <= message.keys() for message in messages)
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good or not messages:
            raise ValueError(f'{path} line {number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
        yield f"{path} line {number}", messages


_Row = tuple[Sequence[int], Sequence[int]]  # tokens and targets


def _padded(rows: Sequence[_Row], length: int, padding: int) -> TensorDataset:
    ids = [[*tokens, *[padding] * (length - len(tokens))] for tokens, _ in rows]
    mask = [[n < len(tokens) for n in range(length)] for tokens, _ in rows]
    targets = [[*wanted, *[IGNORED] * (length - len(wanted))] for _, wanted in rows]
    return TensorDataset((torch.tensor(ids), torch.tensor(mask).long()), (torch.tensor(targets),))


def _packed(rows: Sequence[_Row], length: int, padding: int) -> TensorDataset:
    """Pack rows into sequences in their order: a row that does not fit into the rest of a sequence begins the next.

    Inputs: tokens, and the number of each token's row in its sequence; the padding at the end has a number of its own.
    """
    sequences: list[list[_Row]] = []
    left = 0
    for row in rows:
        if len(row[0]) > left:
            sequences.append([])
            left = length
        sequences[-1].append(row)
        left -= len(row[0])
    ids, documents, targets = [], [], []
    for held in sequences:
        rest = length - sum(len(tokens) for tokens, _ in held)
        filled = [*held, ([padding] * rest, [IGNORED] * rest)]
        ids.append([token for tokens, _ in filled for token in tokens])
        documents.append([number for number, (tokens, _) in enumerate(filled) for _ in tokens])
        targets.append([target for _, wanted in filled for target in wanted])
    return TensorDataset((torch.tensor(ids), torch.tensor(documents)), (torch.tensor(targets),))
