"""Turns text files into a file of token ids that llama.py trains on, with a model's tokenizer.json.

    pip install tokenizers
    python tokenize_text.py tokenizer.json tokens.npy --end '<|end_of_text|>' book.txt letters.txt

Each file is a document, or each line with --lines; after each document comes the token that --end names.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LINES = 1000  # that are handed to the tokenizer at once

Encode = Callable[[list[str]], list[list[int]]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Turn text files into a .npy file of token ids.")
    parser.add_argument("tokenizer", type=Path, help="the model's tokenizer.json")
    parser.add_argument("output", type=Path, help="the file to write, NAME.npy")
    parser.add_argument("texts", type=Path, nargs="+", help="text files in UTF-8")
    parser.add_argument("--end", required=True, metavar="TOKEN", help="the token after each document")
    parser.add_argument("--lines", action="store_true", help="each line that is not blank is a document")
    parser.add_argument("--type", choices=TYPES, help="of the ids; default: the smaller one that fits the vocabulary")
    options = parser.parse_intermixed_args(arguments)
    try:
        check_files(options.output, options.texts)
        encode, vocabulary = load_tokenizer(options.tokenizer)
        kind = token_type(vocabulary, options.type)
        end = end_token(vocabulary, options.end)
        batches = batched(documents(options.texts, options.lines), LINES if options.lines else 1)
        count = write_tokens(options.output, kind, token_batches(encode, batches, end))
    except ValueError as error:
        sys.exit(f"tokenize_text: {error}")
    print(f"{options.output}: {count} tokens of type {kind.name}, vocabulary {max(vocabulary.values()) + 1}")


def load_tokenizer(path: Path) -> tuple[Encode, Mapping[str, int]]:
    """How texts become ids, without special tokens; and the id of every token."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("the library tokenizers is not installed: pip install tokenizers") from None
    if not path.is_file():
        raise ValueError(f"cannot read {path}: no such file")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode, tokenizer.get_vocab(with_added_tokens=True)


def check_files(output: Path, texts: Iterable[Path]) -> None:
    if output.suffix != ".npy":
        raise ValueError(f"the output must be named NAME.npy, got {output}")
    if output.exists():
        raise ValueError(f"{output} exists already")
    if missing := [text for text in texts if not text.is_file()]:
        raise ValueError(f"cannot read {missing[0]}: no such file")


def token_type(vocabulary: Mapping[str, int], chosen: str | None) -> np.dtype[Any]:
    size = max(vocabulary.values()) + 1
    fitting = [name for name, kind in TYPES.items() if size <= np.iinfo(kind).max + 1]
    if chosen and chosen not in fitting:
        raise ValueError(f"a vocabulary of {size} does not fit {chosen}, expected --type {' or '.join(fitting)}")
    return TYPES[chosen or fitting[0]]


def end_token(vocabulary: Mapping[str, int], end: str) -> int:
    if end not in vocabulary:
        raise ValueError(f"--end: the tokenizer has no token {end!r}")
    return vocabulary[end]


def documents(texts: Iterable[Path], lines: bool) -> Iterator[str]:
    for path in texts:
        try:
            if not lines:
                yield path.read_bytes().decode("utf-8")
                continue
            with path.open(encoding="utf-8") as file:
                yield from (line.rstrip("\n") for line in file if line.strip())
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None


def batched(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(texts, size)):
        yield batch


def token_batches(encode: Encode, batches: Iterable[list[str]], end: int) -> Iterator[list[int]]:
    for batch in batches:
        yield [token for ids in encode(batch) for token in (*ids, end)]


def write_tokens(output: Path, kind: np.dtype[Any], batches: Iterable[Sequence[int]]) -> int:
    """The number of tokens. The file is there as a whole or not at all."""
    partial = output.with_name(f".{output.name}.partial")
    count = 0
    try:
        with partial.open("wb") as file:
            begin = _write_header(file, kind, 0)
            for batch in batches:
                file.write(np.array(batch, dtype=kind).tobytes())
                count += len(batch)
            file.seek(0)
            end = _write_header(file, kind, count)
            assert begin == end, "numpy leaves room in the header for the number to grow"
        partial.replace(output)
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _write_header(file: BinaryIO, kind: np.dtype[Any], count: int) -> int:
    description = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, description)
    return file.tell()


if __name__ == "__main__":
    main()
