"""Files of tokens."""

from pathlib import Path

from bamboo_trainer.data import open_sources
from bamboo_trainer.data.__main__ import main
from bamboo_trainer.data.token_file import TokenFile


def opened(path: Path) -> TokenFile:
    (source,) = open_sources(str(path), (".tokens",)).files
    return TokenFile(source)


def tokenized(*arguments: object, code: int = 0) -> None:
    assert main(["tokenize", *map(str, arguments)]) == code
