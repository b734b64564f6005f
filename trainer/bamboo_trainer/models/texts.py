"""Data for models of transformers: tokenized texts, conversations (chat templates), and labelled texts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bamboo_core.complaints import said_by
from bamboo_trainer.data import Documents, TensorDataset, TextDataset, dataset_from, text_bytes
from bamboo_trainer.data import config as data_config
from bamboo_trainer.data.datasets import readers_of
from bamboo_trainer.data.tokenizing import BYTES, ByteEncoder
from bamboo_trainer.models import settings
from bamboo_trainer.models.sequences import (
    IGNORED,
    INPUTS,
    check_tokens,
    check_trim,
    taken_trim,
    trimmed_width,
)
from bamboo_trainer.task import Dataset, Parts, Weighted

TEXT: Final = "text"
TOKENS: Final = "tokens"
TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model", "bpe.codes"),
)


def has_tokenizer(folder: str) -> bool:
    """Return whether the folder has files of a tokenizer. Without any, transformers would make an empty one."""
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

    model: its folder, if it has one. vocabulary: size of the model's vocabulary. path: see `text_bytes`. tokenizer:
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

    Raises ValueError for files of bytes if the model's tokenizer makes other tokens.
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
        """For each token but the last: the next token if that belongs to an answer, else IGNORED."""
        follows = pairwise(zip(self.ids, self.answers, strict=True))
        return [token if learned else IGNORED for _, (token, learned) in follows]


def open_chats(
    model: str | None, vocabulary: int, *, path: str, length: int, packed: bool = False, tokenizer: str | None = None
) -> TensorDataset:
    """Tokenize conversations for training on their answers, and return them as a dataset in memory. Conversations are
    cut after `length` tokens; conversations that then have no answer are left out.

    Inputs: int64 [samples, length], and a mask of the tokens that count, or the number of each token's conversation if
    they are packed. Targets: int64 [samples, length], the next token if it belongs to an answer, else -100. model: its
    folder, if it has one. vocabulary: size of the model's vocabulary. path: of a file with a JSON object {"messages":
    [{"role", "content"}, ...]} in each line. tokenizer: its folder, by default the model's. Raises ValueError.
    """
    folder = model if tokenizer is None else tokenizer
    if folder is None:
        raise ValueError("tokenizer: expected the tokenizer's folder")
    settings.whole_numbers({"length": length}, "length")
    template = ChatTemplate(folder)
    chats = [template.chat(messages, place) for place, messages in _conversations(Path(path))]
    rows = [(chat.ids[:-1][:length], chat.targets[:length]) for chat in chats]
    rows = [row for row in rows if any(target != IGNORED for target in row[1])]
    if not rows:
        raise ValueError(f"{path} has no answer ({ANSWERS}) within {length} tokens")
    check_tokens(torch.tensor([token for tokens, _ in rows for token in tokens]), vocabulary)
    return _packed(rows, length, template.padding) if packed else _padded(rows, length, template.padding)


class ChatTemplate:
    """The chat template of a tokenizer, which makes tokens of conversations. folder: of the tokenizer."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = open_tokenizer(folder)
        if not isinstance(self._tokenizer.chat_template, str):
            raise ValueError(f"tokenizer: the tokenizer in {folder} has no chat template, or several")

    @property
    def padding(self) -> int:
        """The id of the token that pads sequences; 0 if the tokenizer has none."""
        found = self._tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def chat(self, messages: Sequence[Any], place: str) -> Chat:
        """Return a conversation's tokens, and which of them are answers. place: for messages. Raises ValueError."""
        try:
            return self._marked(messages) if self._marks_answers else self._compared(messages, place)
        except Exception as error:  # a template may raise anything
            if isinstance(error, _Unstable):
                raise
            raise ValueError(f"{place}: the chat template does not take it: {said_by(error)}") from None

    @property
    def _marks_answers(self) -> bool:
        words = self._tokenizer.chat_template.replace("{%-", "{%").split("{%")[1:]
        return any(word.split()[:1] == [_MARKS_ANSWERS] for word in words)

    def _marked(self, messages: Sequence[Any]) -> Chat:
        found = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return Chat(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])

    def _compared(self, messages: Sequence[Any], place: str) -> Chat:
        """Tokenize a conversation, for a template that does not mark answers. An answer is the tokens that its message
        adds to the generation prompt before it. Raises _Unstable.
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
    """Error because the template renders the beginning of a conversation differently if more messages follow."""


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


Head = Literal["sequence", "token", "choice"]
HEADS: Final[tuple[Head, ...]] = ("sequence", "token", "choice")
CHOICES: Final = 3  # of made-up data


class Labelled:
    """A dataset of labelled token sequences for a model with a head, made from another dataset.

    Inputs: int64 token ids, perhaps a mask of the tokens that count, and after it the kinds of tokens; their shape is
    [samples, length], or [samples, choices, length] for "choice". Targets: int64 [samples], or [samples, length] for
    "token"; -100 does not count. For "sequence" they may be floats: [samples] for one label, the value to predict, else
    [samples, labels], each true or false.

    words: size of the vocabulary, and the number of labels. where: the config's key, for messages. trim, names: see
    `Sequences`. Raises ValueError if the first sample has another form.
    """

    def __init__(
        self,
        source: Dataset,
        head: Head,
        words: tuple[int, int],
        where: str = "data",
        *,
        trim: int = 0,
    ) -> None:
        self._trim = trim
        self._source, self._head, self._where = source, head, where
        self._words, self._labels = words
        given, targets = source.batch([0])
        dimensions = 3 if head == "choice" else 2
        if not 1 <= len(given) <= len(INPUTS) or len(targets) != 1 or any(t.dim() != dimensions for t in given):
            shape = "[samples, choices, length]" if head == "choice" else "[samples, length]"
            raise ValueError(
                f"{where}: expected tokens {shape}, perhaps a mask and the kinds of tokens, and one target, got inputs "
                f"{[list(t.shape) for t in given]} and {len(targets)} targets"
            )
        self._check(targets[0], given[0])
        self.names, self.masked = INPUTS[: len(given)], len(given) > 1
        check_trim(trim, self.masked, where)
        self.prefetched = readers_of(source)
        self.length = int(given[0].shape[-1])
        self.tokens_per_sample: int | None = None if self.masked else given[0][0].numel()

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Return inputs and targets of these samples. Raises ValueError for an unknown token or label."""
        given, (target,) = self._source.batch(indices)
        ids = given[0].long()
        check_tokens(ids, self._words, self._where)
        self._check(target, ids)
        width = trimmed_width(given[1], self._trim) if self.masked else ids.shape[-1]
        target = target[:, :width].contiguous() if self._head == "token" else target
        return tuple(part.long()[..., :width].contiguous() for part in given), (target,)

    def _check(self, target: Tensor, ids: Tensor) -> None:
        if target.is_floating_point():
            if self._head != "sequence":
                raise ValueError(f"{self._where}: expected whole numbers as labels, got {target.dtype}")
            several = (len(ids), self._labels)
            if tuple(target.shape) not in ({(len(ids),), several} if self._labels == 1 else {several}):
                raise ValueError(f"{self._where}: expected {self._labels} values a sample, got {list(target.shape)}")
            return
        expected = ids.shape if self._head == "token" else ids.shape[:1]
        if target.shape != expected:
            raise ValueError(f"{self._where}: expected labels of shape {list(expected)}, got {list(target.shape)}")
        most = ids.shape[1] if self._head == "choice" else self._labels
        strange = target[(target != IGNORED) & ((target < 0) | (target >= most))]
        if len(strange):
            raise ValueError(f"{self._where}: expected labels below {most}, or {IGNORED}, got {int(strange[0])}")


def open_labelled(config: Mapping[str, Any], head: Head, words: int, labels: int, where: str = "data") -> Labelled:
    """Open the samples that a config describes. Raises ValueError.

    config: the kind "random", with "length", "samples" and "padding", is made-up samples, and the default; for other
    kinds see `bamboo_trainer.data.dataset_from`. words: size of the vocabulary. labels: their number.
    """
    given = dict(config)
    trim = taken_trim(given, where)
    made_up = {settings.MADE_UP: partial(_made_up, head, words, labels)}
    source = dataset_from({"kind": settings.MADE_UP, **given}, where, made_up)
    return Labelled(source, head, (words, labels), where, trim=trim)


def label_loss(outputs: Parts, targets: Parts) -> Weighted:
    """Return the loss as transformers computes it, summed, so that a step's loss is the mean over its whole batch.

    Whole numbers as labels: cross entropy; -100 does not count. Floats: squared error if there is one label, else
    binary cross entropy.
    """
    (logits,), (labels,) = outputs, targets
    if not labels.is_floating_point():
        flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.flatten()
        summed = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
        return Weighted(summed, (wanted != IGNORED).sum())
    wanted = labels.reshape(logits.shape)
    if logits.shape[-1] == 1:
        return Weighted(F.mse_loss(logits, wanted, reduction="sum"), torch.tensor(wanted.numel()))
    summed = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
    return Weighted(summed, torch.tensor(wanted.numel()))


def label_accuracy(outputs: Parts, targets: Parts) -> tuple[Tensor, Tensor]:
    """Return the number of right predictions, and the number of predictions.

    Whole numbers as labels: right if the label has the highest logit; -100 does not count. Floats: with one label,
    right if the prediction differs from it by less than 0.5; else each true or false label is a prediction of its own.
    """
    (logits,), (labels,) = outputs, targets
    if not labels.is_floating_point():
        counts = labels != IGNORED
        return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()
    wanted = labels.reshape(logits.shape)
    right = (logits - wanted).abs() < 0.5 if logits.shape[-1] == 1 else (logits > 0) == (wanted > 0.5)
    return right.sum(), torch.tensor(right.numel())


def _made_up(
    head: Head, words: int, labels: int, *, where: str, samples: int = 512, length: int = 32, padding: bool = False
) -> TensorDataset:
    """Make up labelled data. A sequence's second token decides its label, each token its own label; the right choice
    begins with token 1.
    """
    settings.whole_numbers({"samples": samples, "length": length}, "samples", "length")
    length = max(2, length)
    generator = torch.Generator().manual_seed(settings.made_up_seed(where))
    shape = (samples, CHOICES, length) if head == "choice" else (samples, length)
    ids = torch.randint(min(2, words - 1), words, shape, generator=generator)
    target = ids % labels if head == "token" else ids[:, 1] % labels if head == "sequence" else None
    if target is None:
        target = torch.randint(CHOICES, (samples,), generator=generator)
        ids[torch.arange(samples), target, 0] = 1
    elif labels == 1:
        target = ids[:, 1] / words if head == "sequence" else target
    if not padding:
        return TensorDataset((ids,), (target,))
    least = torch.randint(length // 2 + 1, length + 1, (*shape[:-1], 1), generator=generator)
    mask = torch.arange(length) < least
    target = torch.where(mask, target, IGNORED) if head == "token" else target
    return TensorDataset((ids * mask, mask.long()), (target,))
