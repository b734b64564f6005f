"""Tokenization of text files into files of tokens, by bytes or with a tokenizer.json of the library `tokenizers`."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from bamboo_core.complaints import said_by, system_reason
from bamboo_core.names import DocumentUnit
from bamboo_core.storage.local_files import whole_file, whole_folder
from bamboo_trainer.data.sources import SUFFIX
from bamboo_trainer.data.token_file import TokenWriter

BYTES: Final = "bytes"
PATTERNS: Final = ("*.txt", "*.md", "*.jsonl", "*.jsonl.gz")
AT_ONCE: Final = 1000  # documents that are handed to the tokenizer together,
CHARACTERS_AT_ONCE: Final = 4 << 20  # or fewer, with at least this many bytes
LONGEST_LINE: Final = 256 << 20  # bytes

Progress = Callable[[int, int], None]  # bytes read, bytes in total


class Encoder(Protocol):
    """A tokenizer of texts."""

    vocabulary: int  # its size

    def encode(self, texts: Sequence[bytes]) -> Sequence[Any]:
        """Return the token ids of each text. Raises UnicodeDecodeError if a text must be UTF-8 and is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A document in a text file."""

    file: Path
    content: bytes
    read: int  # bytes of all files up to the document's end, for progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The numbers of files, documents and tokens that `tokenize` has written, and the vocabulary's size."""

    files: int
    documents: int
    tokens: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Files of documents. unit: a document is a file, or a line that is not blank. In .jsonl and .jsonl.gz files, a
    document is always a line that is not blank: a JSON object with the document's text in `field`.
    """

    files: Sequence[Path]
    field: str = "text"
    unit: DocumentUnit = DocumentUnit.FILE

    def documents(self) -> Iterator[Text]:
        """Yield the documents that are not empty. Raises ValueError for an unreadable file or an invalid line."""
        before = 0
        for path in self.files:
            with _readable(path):
                is_json = path.name.endswith((".jsonl", ".jsonl.gz"))
                if is_json or self.unit is DocumentUnit.LINE:
                    yield from self._of_lines(path, before, is_json)
                else:
                    with path.open("rb") as raw, _unpacked(path, raw) as file:
                        if content := file.read():
                            yield Text(file=path, content=content, read=before + raw.tell())
            before += path.stat().st_size

    def _of_lines(self, path: Path, before: int, is_json: bool) -> Iterator[Text]:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"{path} line {number} is longer than {LONGEST_LINE} bytes, the most of a document"
                    )
                if not line.strip():
                    continue
                content = _of_line(line, self.field) if is_json else line.rstrip(b"\r\n")
                if content is None:
                    raise ValueError(
                        f'{path} line {number}: expected a JSON object with a text "{self.field}" '
                        "(--field names another)"
                    )
                if content:
                    yield Text(file=path, content=content, read=before + raw.tell())


class ByteEncoder:
    """An encoder with 256 tokens, one for each value of a byte."""

    vocabulary = 256

    def encode(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        return texts


class TokenizerEncoder:
    """An encoder with a tokenizer.json of the library `tokenizers`. file: its path. end: the token that follows each
    document, "" for none. Raises ValueError.
    """

    def __init__(self, file: Path, end: str = "") -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                "the library tokenizers is not installed: pip install 'bamboo-trainer[tokenizers]'"
            ) from None
        if not file.is_file():
            raise ValueError(f"--tokenizer: there is no file {file}, expected a tokenizer.json")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"--tokenizer: {file} is not a tokenizer.json: {said_by(error)}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not known:
            raise ValueError(f"--tokenizer: {file} has no tokens")
        if end and end not in known:
            raise ValueError(f"--end: the tokenizer has no token {end!r}")
        self.vocabulary = max(known.values()) + 1
        self._end = [known[end]] if end else []

    def encode(self, texts: Sequence[bytes]) -> Sequence[list[int]]:
        decoded = [text.decode() for text in texts]
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [[*encoding.ids, *self._end] for encoding in encodings]


def text_files(given: Sequence[Path], patterns: Sequence[str], output: Path) -> list[Path]:
    """Return the given files and, for each given folder, the files in it or below that match a pattern, by name.

    Raises ValueError if a path does not exist, if a folder has no such file, or if `output` is one of these paths.
    """
    files: list[Path] = []
    for path in given:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            matching = {file for pattern in patterns for file in path.rglob(pattern) if file.is_file()}
            if not matching:
                raise ValueError(f"{path} has no file that matches {' or '.join(patterns)} (--pattern)")
            files += sorted(matching)
        else:
            raise ValueError(f"cannot read {path}: there is no such file or folder")
    if output in files:
        raise ValueError(f"{output} is one of the texts")
    return files


def tokenize(
    texts: Texts,
    encoder: Encoder,
    output: Path,
    *,
    shard: int | None = None,
    force: bool = False,
    progress: Progress = lambda done, of: None,
) -> Written:
    """Tokenize texts into a file of tokens, or into a folder of such files. The output appears as a whole at the end.

    shard: number of tokens after which the next document with tokens begins a new file in the folder `output`; None:
    one file. force: if shard is None, replace an existing file. progress: called after each batch. Raises ValueError.
    """
    if output.exists() and not (force and shard is None):
        raise ValueError(f"{output} exists already")
    documents = _encoded(texts, encoder, progress)
    try:
        if shard is None:
            with whole_file(output) as file, TokenWriter(file, encoder.vocabulary) as writer:
                for tokens in documents:
                    writer.add(tokens)
                _require_tokens(writer.tokens)
            return Written(files=1, documents=writer.documents, tokens=writer.tokens, vocabulary=encoder.vocabulary)
        with whole_folder(output) as folder:
            return _shards(folder, documents, encoder.vocabulary, shard)
    except OSError as error:
        raise ValueError(f"cannot write {output}: {system_reason(error)}") from None


def _shards(folder: Path, documents: Iterator[Any], vocabulary: int, shard: int) -> Written:
    number, counted, tokens = 0, 0, 0
    document = next(documents, None)
    while document is not None:
        with (folder / f"part-{number:05}{SUFFIX}").open("wb") as file, TokenWriter(file, vocabulary) as writer:
            while document is not None and (writer.tokens < max(1, shard) or not len(document)):
                writer.add(document)
                document = next(documents, None)
        number, counted, tokens = number + 1, counted + writer.documents, tokens + writer.tokens
    _require_tokens(tokens)
    return Written(files=number, documents=counted, tokens=tokens, vocabulary=vocabulary)


def _require_tokens(tokens: int) -> None:
    if not tokens:
        raise ValueError("there is no text in these files")


def _encoded(texts: Texts, encoder: Encoder, progress: Progress) -> Iterator[Any]:
    """Yield the token ids of each document; the encoder gets documents in batches. Raises ValueError."""
    total = sum(file.stat().st_size for file in texts.files)
    documents = texts.documents()
    while batch := _batch(documents):
        try:
            yield from encoder.encode([text.content for text in batch])
        except UnicodeDecodeError:
            raise ValueError(_not_utf8(batch)) from None
        progress(batch[-1].read, total)


def _batch(texts: Iterator[Text]) -> list[Text]:
    batch: list[Text] = []
    characters = 0
    for text in islice(texts, AT_ONCE):
        batch.append(text)
        characters += len(text.content)
        if characters >= CHARACTERS_AT_ONCE:
            break
    return batch


def _not_utf8(batch: Sequence[Text]) -> str:
    for text in batch:
        try:
            text.content.decode()
        except UnicodeDecodeError as error:
            return f"{text.file} is not UTF-8: {error}"
    raise AssertionError("one of them is not")


def _of_line(line: bytes, field: str) -> bytes | None:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = parsed.get(field) if isinstance(parsed, dict) else None
    return text.encode(errors="replace") if isinstance(text, str) else None


def _unpacked(path: Path, raw: BinaryIO) -> AbstractContextManager[Any]:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else nullcontext(raw)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {system_reason(error)}") from None
    except zlib.error as error:
        raise ValueError(f"cannot read {path}: its compressed content is damaged ({error})") from None
    except EOFError:
        raise ValueError(f"cannot read {path}: it ends in the middle (was its compression interrupted?)") from None
