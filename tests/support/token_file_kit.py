"""Helpers that write and read files of tokens."""

import json
from pathlib import Path

from bamboo_core.storage.local_files import whole_file
from bamboo_trainer.data import open_sources
from bamboo_trainer.data.token_file import TokenFile, TokenWriter
from bamboo_trainer.offline import main


def opened(path: Path) -> TokenFile:
    (source,) = open_sources(str(path))
    return TokenFile(source)


def tokenized(*texts: object, code: int = 0, **options: object) -> None:
    assert main("tokenize", json.dumps(options, default=str), *map(str, texts)) == code


def written(path: Path, documents: list[list[int]], vocabulary: int = 256) -> Path:
    with whole_file(path) as file, TokenWriter(file, vocabulary) as writer:
        for document in documents:
            writer.add(document)
    return path
