"""Conversations written by a tokenizer's chat template; training learns only the answers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from bamboo_core.complaints import said_by
from bamboo_core.text import suggestion
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.models.parts.sequences import IGNORED, check_tokens, whole_number
from bamboo_trainer.models.parts.tokenizers import open_tokenizer

KIND: Final = "chats"
ANSWERS: Final = "assistant"  # the role whose messages are learned
_MARKS_ANSWERS: Final = "generation"  # the block by which a template marks an answer
_KEYS: Final = ("path", "length", "tokenizer", "packed")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. ids: its tokens. answers: for each, whether it is of an answer."""

    ids: Sequence[int]
    answers: Sequence[bool]

    @property
    def targets(self) -> list[int]:
        """The token after each one but the last, if it is of an answer; else IGNORED."""
        follows = pairwise(zip(self.ids, self.answers, strict=True))
        return [token if learned else IGNORED for _, (token, learned) in follows]


def open_chats(model: str | None, vocabulary: int, config: Mapping[str, Any], where: str) -> TensorDataset:
    """Open conversations as samples. Conversations without an answer are left out.

    Inputs: int64 [samples, length], and a mask of the tokens that count, or the number of each token's conversation if
    they are packed. Targets: for the token at the same place. model: its folder, if it has one. vocabulary: the size of
    the model's. config: {"path": of a file with a JSON object {"messages": [{"role", "content"}, ...]} in each line,
    "length", "packed": false, "tokenizer": its folder, by default the model's}. Raises ValueError.
    """
    for key in config:
        if key not in _KEYS:
            raise ValueError(f"{where}: unknown key {key!r}, {suggestion(key, ['kind', *_KEYS])}")
    path, folder, packed = config.get("path"), config.get("tokenizer", model), config.get("packed", False)
    if not isinstance(path, str):
        raise ValueError(f"{where}.path: expected a file of conversations, got {path!r}")
    if not isinstance(folder, str):
        raise ValueError(f"{where}.tokenizer: expected the tokenizer's folder, got {folder!r}")
    if not isinstance(packed, bool):
        raise ValueError(f"{where}.packed must be true or false, got {packed!r}")
    length = whole_number(config.get("length"), f"{where}.length")
    template = ChatTemplate(folder, where)
    chats = [template.chat(messages, place) for place, messages in _conversations(Path(path), where)]
    rows = [(chat.ids[:-1][:length], chat.targets[:length]) for chat in chats]
    rows = [row for row in rows if any(target != IGNORED for target in row[1])]
    if not rows:
        raise ValueError(f"{where}: {path} has no answer ({ANSWERS}) within {length} tokens")
    check_tokens(torch.tensor([token for tokens, _ in rows for token in tokens]), vocabulary, where)
    return _packed(rows, length, template.padding) if packed else _padded(rows, length, template.padding)


class ChatTemplate:
    """The chat template of the tokenizer in that folder."""

    def __init__(self, folder: str, where: str) -> None:
        self._where, self._tokenizer = where, open_tokenizer(folder, where)
        if not isinstance(self._tokenizer.chat_template, str):
            raise ValueError(f"{where}.tokenizer: the tokenizer in {folder} has no chat template, or several")

    @property
    def padding(self) -> int:
        """The token that fills sequences up."""
        found = self._tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def chat(self, messages: Sequence[Any], place: str) -> Chat:
        """Return a conversation's tokens. place: where the conversation is, for messages. Raises ValueError."""
        try:
            return self._marked(messages) if self._marks_answers else self._compared(messages, place)
        except Exception as error:  # a template may raise anything
            if isinstance(error, _Unstable):
                raise
            raise ValueError(f"{self._where}: {place}: the chat template does not take it: {said_by(error)}") from None

    @property
    def _marks_answers(self) -> bool:
        words = self._tokenizer.chat_template.replace("{%-", "{%").split("{%")[1:]
        return any(word.split()[:1] == [_MARKS_ANSWERS] for word in words)

    def _marked(self, messages: Sequence[Any]) -> Chat:
        found = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return Chat(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])

    def _compared(self, messages: Sequence[Any], place: str) -> Chat:
        """Find answers by comparison: an answer follows the words that ask for it."""
        ids = self._tokens(messages)
        answers = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            asked, answered = self._tokens(messages[:number], asks=True), self._tokens(messages[: number + 1])
            if ids[: len(answered)] != answered or answered[: len(asked)] != asked:
                raise _Unstable(
                    f"{self._where}: {place}: what the chat template writes of message {number + 1} depends on what "
                    f"comes behind it; mark answers in the template by {{% {_MARKS_ANSWERS} %}}"
                )
            answers[len(asked) : len(answered)] = [True] * (len(answered) - len(asked))
        return Chat(ids, answers)

    def _tokens(self, messages: Sequence[Any], *, asks: bool = False) -> list[int]:
        found = self._tokenizer.apply_chat_template(messages, return_dict=True, add_generation_prompt=asks)
        return list(found["input_ids"])


class _Unstable(ValueError):
    """Error because a conversation's beginning is written in another way when more follows."""


def _conversations(path: Path, where: str) -> Iterator[tuple[str, list[Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}.path: cannot read {path}: {said_by(error)}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            good = isinstance(messages, list) and all({"role", "content"} <= message.keys() for message in messages)
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good or not messages:
            raise ValueError(
                f'{where}: {path} line {number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
            )
        yield f"{path} line {number}", messages


_Row = tuple[Sequence[int], Sequence[int]]  # tokens and targets


def _padded(rows: Sequence[_Row], length: int, padding: int) -> TensorDataset:
    ids = [[*tokens, *[padding] * (length - len(tokens))] for tokens, _ in rows]
    mask = [[n < len(tokens) for n in range(length)] for tokens, _ in rows]
    targets = [[*wanted, *[IGNORED] * (length - len(wanted))] for _, wanted in rows]
    return TensorDataset((torch.tensor(ids), torch.tensor(mask).long()), (torch.tensor(targets),))


def _packed(rows: Sequence[_Row], length: int, padding: int) -> TensorDataset:
    """Pack rows in their order: one that does not fit into the rest of a sequence begins the next one."""
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
