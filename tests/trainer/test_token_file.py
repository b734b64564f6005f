"""Files of tokens: made from texts, written as documented, read back, refused if damaged."""

import gzip
import json
import struct
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bamboo.cli.commands import app
from token_file_kit import opened, tokenized, written


def read_through(path: Path) -> None:
    file = opened(path)
    file.ends()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 70_000), max_size=9), min_size=1, max_size=9), st.integers(0, 1))
def test_what_is_written_is_read(tmp_path_factory, documents, wide):
    path = tmp_path_factory.mktemp("tokens") / "a.tokens"
    documents = [[token if wide else token % 300 for token in document] for document in documents]
    file = opened(written(path, documents, 70_001 if wide else 300))
    flat = list(chain(*documents))
    assert file.header.width == (4 if wide else 2)
    assert file.tokens(0, len(flat)).tolist() == flat
    assert file.ends().tolist() == list(accumulate(map(len, documents)))


def test_the_format_is_the_documented_one(tmp_path):
    data = written(tmp_path / "a.tokens", [[1, 2, 3], [4]], 300).read_bytes()
    assert struct.unpack("<8sIIQQQ", data[:40]) == (b"BAMBOOTK", 1, 2, 4, 2, 300)
    assert np.frombuffer(data[64:72], "<u2").tolist() == [1, 2, 3, 4]
    assert np.frombuffer(data[72:], "<u8").tolist() == [3, 4]
    with pytest.raises(ValueError, match="there is a token -1 in a vocabulary of 300"):
        written(tmp_path / "b.tokens", [[5, -1, 6]], 300)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: b"", "is not a file of tokens"),
        (lambda data: b"x" * 200, "is not a file of tokens"),
        (lambda data: data[:-3], "is damaged: it has 77 bytes, its header says 80"),
        (lambda data: data[:8] + b"\2" + data[9:], "has version 2 of the format, expected 1"),
        (lambda data: data[:72] + data[76:80] * 2, "its documents do not end one after the other"),
    ],
)
def test_a_damaged_file_is_told(tmp_path, spoil, said):
    path = written(tmp_path / "a.tokens", [[1, 2, 3, 4]])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=said) as caught:
        read_through(path)
    assert str(path) in str(caught.value)


def test_a_damaged_or_overlong_text_is_told(tmp_path, monkeypatch, capsys):
    packed = bytearray(gzip.compress(b'{"text": "abc"}\n' * 1000))
    packed[15:30] = b"\xff" * 15
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    tokenized(tmp_path / "a.jsonl.gz", output=tmp_path / "o.tokens", code=1)
    assert "a.jsonl.gz: its compressed content is damaged" in capsys.readouterr().err
    monkeypatch.setattr("bamboo_trainer.data.tokenizing.LONGEST_LINE", 8)
    (tmp_path / "b.txt").write_text("1234567\n12345678\n")
    tokenized(tmp_path / "b.txt", output=tmp_path / "o.tokens", document="line", code=1)
    assert "b.txt line 2 is longer than 8 bytes" in capsys.readouterr().err


def test_texts_become_bytes(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_bytes(b"two\xff")
    (folder / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "\\u00e9"}\n{"text": ""}\n')
    (folder / "skipped.py").write_text("no")
    tokenized(folder, output=tmp_path / "out.tokens")
    file = opened(tmp_path / "out.tokens")
    assert file.tokens(0, file.header.tokens).astype(np.uint8).tobytes() == b"one\xc3\xa9two\xff"
    assert file.ends().tolist() == [3, 5, 9]
    assert "9 tokens, 3 documents, vocabulary 256" in capsys.readouterr().out
    tokenized(folder, output=tmp_path / "lines.tokens", pattern=["*.py"], document="line")
    assert opened(tmp_path / "lines.tokens").header.tokens == 2


@pytest.mark.parametrize(
    ("unit", "documents"),
    [
        ("file", ["one\r\ntwo\n\n \n\nthree\n\n\n", '{"text": "a"}\n\nb']),
        ("line", ["one", "two", "three", '{"text": "a"}', "b"]),
    ],
)
def test_what_of_a_text_is_a_document_is_chosen(tmp_path, unit, documents):
    """`document` says whether a text file or each non-blank line is a document; in .jsonl files, a line always is."""
    texts = [tmp_path / name for name in ("a.txt.gz", "b.txt", "c.jsonl")]
    texts[0].write_bytes(gzip.compress(b"one\r\ntwo\n\n \n\nthree\n\n\n"))
    texts[1].write_bytes(b'{"text": "a"}\n\nb')
    texts[2].write_bytes(b'{"text": "x\\n\\ny"}\n')
    tokenized(*texts, output=tmp_path / "o.tokens", document=unit)
    file = opened(tmp_path / "o.tokens")
    assert file.header.documents == len(documents) + 1
    assert file.header.tokens == len("".join([*documents, "x\n\ny"]))


def test_shards_end_with_a_document(tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"{'x' * 9}{i}\n" for i in range(10)))
    tokenized(text, output=tmp_path / "out", shard=25, document="line")
    assert [opened(file).header.tokens for file in sorted((tmp_path / "out").iterdir())] == [30, 30, 30, 10]
    tokenized(text, output=tmp_path / "out", shard=25, code=1)
    assert len(list(tmp_path.iterdir())) == 2


def test_texts_are_tokenized_by_any_tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[end]": 0, "a": 1, "b": 70_000}, unk_token="[end]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("a b a")
    tokenized(
        tmp_path / "x.txt",
        output=tmp_path / "o.tokens",
        tokenizer=tmp_path / "tokenizer.json",
        end="[end]",
    )
    file = opened(tmp_path / "o.tokens")
    assert file.tokens(0, 4).tolist() == [1, 70_000, 1, 0]
    assert file.header.vocabulary == 70_001


def test_the_command_line_says_what_a_file_has(tmp_path, capfd):
    (tmp_path / "x.jsonl").write_text(json.dumps({"body": "abc"}))
    given = ["tokenize", str(tmp_path), "-o", str(tmp_path / "n.tokens"), "--field", "body", "-q"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert "3 tokens, 1 document, vocabulary 256" in capfd.readouterr().out
