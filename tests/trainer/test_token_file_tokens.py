"""Datasets of token sequences from files of tokens."""

from itertools import pairwise

import pytest
import torch

from bamboo_trainer.data import Documents, Tokens, dataset_from, open_sources
from bamboo_trainer.data.tokenizing import ByteEncoder, Texts, tokenize
from token_file_kit import opened, written


def test_sequences_lie_one_after_the_other_and_stay_inside_a_file(tmp_path):
    written(tmp_path / "a.tokens", [list(range(10))])
    written(tmp_path / "b.tokens", [list(range(100, 108))])
    written(tmp_path / ".c.tokens", [list(range(99))])
    data = Tokens(open_sources(str(tmp_path)), 3)
    assert len(data) == 3 + 2
    (inputs,), (targets,) = data.batch([2, 3, 0])
    assert inputs.tolist() == [[6, 7, 8], [100, 101, 102], [0, 1, 2]]
    assert targets.tolist() == [[7, 8, 9], [101, 102, 103], [1, 2, 3]]
    assert inputs.dtype == targets.dtype == torch.int64


def test_a_file_without_tokens_shifts_nothing(tmp_path):
    for name, document in {"a": list(range(21)), "b": [], "c": list(range(100, 121))}.items():
        written(tmp_path / f"{name}.tokens", [document])
    data = Tokens(open_sources(str(tmp_path)), 4)
    assert len(data) == 10
    assert data.batch(range(10))[0][0][:, 0].tolist() == [0, 4, 8, 12, 16, 100, 104, 108, 112, 116]


class WithoutBlanks(ByteEncoder):
    def encode(self, texts):
        return [text.strip() for text in texts]


def test_a_shard_begins_with_a_document_that_has_tokens(tmp_path):
    contents = [b" ", b"a" * 9, b" ", b"b" * 9, b" ", b" "]
    files = [tmp_path / f"{number}.txt" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert tokenize(Texts(files=files), WithoutBlanks(), tmp_path / "out", shard=5).files == 2
    headers = [opened(file).header for file in sorted((tmp_path / "out").iterdir())]
    assert [(header.tokens, header.documents) for header in headers] == [(9, 3), (9, 3)]


def test_numbered_documents_first_tokens_are_no_targets(tmp_path):
    path = written(tmp_path / "a.tokens", [[1, 2], [3, 4, 5], [], [6, 7, 8, 9]])
    sources = open_sources(str(path))
    (inputs, numbers), (targets,) = Tokens(sources, 4, Documents.NUMBERED).batch([0, 1])
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert targets.tolist() == [[2, -100, 4, 5], [-100, 7, 8, 9]]
    assert numbers[0].tolist() == [0, 0, 1, 1]
    assert [int(b) > int(a) for a, b in pairwise(numbers[1])] == [True, False, False]


def test_a_manifest_names_them(tmp_path):
    path = written(tmp_path / "a.tokens", [list(range(64))])
    data = dataset_from({"kind": "tokens", "path": str(path), "length": 8, "documents": "numbered"})
    assert len(data) == 7
    with pytest.raises(ValueError, match=r"^data: .*no file has more than 64 tokens, the length of a sequence"):
        dataset_from({"kind": "tokens", "path": str(path), "length": 64})
    with pytest.raises(ValueError, match=r"^data: documents must be one of joined, numbered, got 'x'"):
        dataset_from({"kind": "tokens", "path": str(path), "length": 8, "documents": "x"})
