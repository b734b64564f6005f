"""How far a command is: one line that changes on a terminal, elsewhere a line now and then."""

import sys

import pytest

from bamboo_trainer import progress_line
from bamboo_trainer.progress_line import LINE_SECONDS, ProgressLine


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
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now)
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
