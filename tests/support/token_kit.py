"""Files of tokens."""

from pathlib import Path

from bamboo_trainer.data.token_file import TokenWriter, new_file


def written(path: Path, documents: list[list[int]], vocabulary: int = 256) -> Path:
    with new_file(path) as file, TokenWriter(file, vocabulary) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
    return path
