"""`python -m bamboo_trainer.data`, the process of `bamboo tokenize`: the `bamboo` command itself needs no torch."""

import argparse
import signal
import sys
from pathlib import Path

from bamboo_core import standard_streams
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, DocumentUnit
from bamboo_core.storage.bounded import StorageError
from bamboo_core.text import count, size
from bamboo_trainer.data.sources import SUFFIX
from bamboo_trainer.data.tokenizing import (
    BYTES,
    PATTERNS,
    ByteEncoder,
    Encoder,
    ProgressLine,
    Texts,
    TokenizerEncoder,
    text_files,
    tokenize,
)


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    try:
        return _tokenize(given)
    except (ValueError, StorageError) as error:
        complain(error)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bamboo_trainer.data")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", default=BYTES)
    parser.add_argument("--end", default="")
    parser.add_argument("--field", default="text")
    parser.add_argument("--document", type=DocumentUnit, default=DocumentUnit.FILE)
    parser.add_argument("--pattern", action="append")
    parser.add_argument("--shard", type=int)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    return parser


def _tokenize(given: argparse.Namespace) -> int:
    output: Path = given.output
    if given.shard is None and output.suffix != SUFFIX:
        raise ValueError(f"--output {output}: expected a file NAME{SUFFIX}, or with --shard a folder's name")
    files = text_files(given.texts, given.pattern or PATTERNS, output)
    encoder: Encoder = ByteEncoder() if given.tokenizer == BYTES else TokenizerEncoder(Path(given.tokenizer), given.end)
    if given.tokenizer == BYTES and given.end:
        raise ValueError("--end: bytes have no such token; expected it together with --tokenizer")
    done = tokenize(
        Texts(files=files, field=given.field, unit=given.document),
        encoder,
        output,
        shard=given.shard,
        force=given.force,
        progress=(lambda *_: None) if given.quiet else ProgressLine(_read),
    )
    in_files = f" in {count(done.files, 'file')}" if given.shard else ""
    print(f"{output}: {count(done.tokens, 'token')}, {count(done.documents, 'document')}{in_files}, ", end="")
    print(f"vocabulary {done.vocabulary}")
    return EXIT_OK


def _read(done: int, of: int) -> str:
    return f"{size(done)} of {size(of)} read"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(EXIT_INTERRUPTED))  # so that unfinished output is removed
    sys.exit(standard_streams.exit_of(lambda: main(sys.argv[1:])))
