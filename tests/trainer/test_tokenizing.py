"""From texts to files of tokens."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from token_file_kit import opened, tokenized

PATIENCE = 120.0


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ('{"txt": 1}\n', [], 'a.jsonl line 1: expected a JSON object with a text "text" (--field names another)'),
        ('{"text": "x"}\nrubbish\n', [], "a.jsonl line 2: expected a JSON object"),
        ("\n", [], "there is no text in these files"),
        ('{"text": "x"}', ["--tokenizer", "nowhere.json"], "--tokenizer: there is no file nowhere.json"),
        ('{"text": "x"}', ["--tokenizer", "gpt2"], "AutoTokenizer.from_pretrained('gpt2').save_pretrained('gpt2')"),
        (
            '{"text": "x"}',
            ["--tokenizer", "."],
            "--tokenizer: . is a folder, expected a tokenizer.json",
        ),
        ('{"text": "x"}', ["--end", "x"], "--end: bytes have no such token"),
        ('{"text": "x"}', ["--output", "out.npy"], "--output out.npy: expected a file NAME.tokens"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(tmp_path, monkeypatch, capsys, content, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(content)
    tokenized("a.jsonl", "--output", "out.tokens", *arguments, code=1)
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_killed_writer_leaves_nothing_that_counts_and_the_next_one_succeeds(tmp_path, capsys):
    """The first process waits for the end of its text, which is a pipe, when it is killed."""
    os.mkfifo(tmp_path / "pipe.txt")
    output = tmp_path / "out.tokens"
    script = (
        "import sys; from pathlib import Path; from bamboo_trainer.data.tokenizing import *;"
        "texts = Texts(files=[Path(sys.argv[1]), Path(sys.argv[2])], unit=DocumentUnit.LINE);"
        "tokenize(texts, ByteEncoder(), Path(sys.argv[3]))"
    )
    (tmp_path / "first.txt").write_text("some text\n" * 2000)
    arguments = [tmp_path / "first.txt", tmp_path / "pipe.txt", output]
    writer = subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)])
    partial = tmp_path / ".out.tokens.partial"
    deadline = time.monotonic() + PATIENCE
    while not (partial.exists() and partial.stat().st_size > 0):
        assert time.monotonic() < deadline
        assert writer.poll() is None
        time.sleep(0.02)
    tokenized(tmp_path / "first.txt", "--output", output, code=1)
    assert f"{output} is being written by another process" in capsys.readouterr().err
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert not output.exists()
    tokenized(tmp_path / "first.txt", "--output", output)
    assert opened(output).ends()[-1] == 20000
    assert not partial.exists()
