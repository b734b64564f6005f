"""Conversion of texts into files of tokens: progress lines, and users' mistakes."""

import sys
from pathlib import Path

import pytest

from bamboo_trainer import offline
from bamboo_trainer.offline import LINE_SECONDS, ProgressLine
from token_file_kit import tokenized


def line() -> ProgressLine:
    return ProgressLine(lambda done, of: f"{done} of {of}")


def test_a_terminal_has_one_line_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = line()
    shown(1, 2)
    shown(2, 2)
    assert capsys.readouterr().err.split() == ["1", "of", "2", "2", "of", "2"]
    shown(2, 2)
    assert capsys.readouterr().err == "\r2 of 2   \n"


def test_elsewhere_lines_are_rare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(offline.time, "monotonic", lambda: now)
    shown = line()
    shown(1, 9)
    now += LINE_SECONDS + 1
    shown(2, 9)
    shown(3, 9)
    assert capsys.readouterr().err == "2 of 9\n"
    shown(9, 9)
    assert capsys.readouterr().err == "9 of 9\n", "and the end"
    quick = line()
    quick(9, 9)
    assert capsys.readouterr().err == "", "what is quick is not told of"


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ('{"txt": 1}\n', {}, 'a.jsonl line 1: expected a JSON object with a text "text" (--field names another)'),
        ('{"text": "x"}\nrubbish\n', {}, "a.jsonl line 2: expected a JSON object"),
        ("\n", {}, "there is no text in these files"),
        ('{"text": "x"}', {"tokenizer": "nowhere.json"}, "--tokenizer: there is no file nowhere.json"),
        ('{"text": "x"}', {"tokenizer": "."}, "--tokenizer: there is no file ., expected a tokenizer.json"),
        ('{"text": "x"}', {"end": "x"}, "--end: bytes have no such token"),
        ('{"text": "x"}', {"output": "out.npy"}, "--output out.npy: expected a file NAME.tokens"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(tmp_path, monkeypatch, capsys, content, options, said):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(content)
    tokenized("a.jsonl", code=1, **{"output": "out.tokens", **options})
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
