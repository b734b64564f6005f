"""Output to standard streams that have no reader, are on a full disk, are closed, or cannot encode some letters."""

import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bamboo_core import standard_streams
from bamboo_core.history.records import EventRecord, to_lines
from bamboo_core.standard_streams import SHOWN

BAMBOO = [sys.executable, "-c", "from bamboo.cli.commands import main; main()"]
SECONDS = 60.0


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("utf-8", "ä \udcff", b"\xc3\xa4 \xff"),
        ("utf-8", "\ud800", b"\\ud800"),
        ("ascii", "ä \udcc3\udca4", b"\xc3\xa4 \xc3\xa4"),
        ("latin-1", "ä → \udce4", b"\xe4 \\u2192 \xe4"),
    ],
)
def test_any_text_can_be_written(encoding: str, text: str, written: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding))
    standard_streams.prepare()
    assert sys.stdout.errors == SHOWN
    print(text, end="", flush=True)
    assert raw.getvalue() == written


@pytest.mark.parametrize(
    ("redirection", "code", "sentence"),
    [
        (">/dev/full", 1, "bamboo: cannot write standard output: No space left on device\n"),
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        ("2>/dev/full", 0, ""),
        (">/dev/full 2>/dev/full", 1, ""),
        ("| true", 0, ""),
    ],
)
@pytest.mark.parametrize(("command", "unbuffered"), [("--version", "1"), ("history", ""), ("history", "1")])
def test_a_command_whose_output_cannot_be_written_says_so_in_a_sentence(
    tmp_path: Path, command: str, unbuffered: str, redirection: str, code: int, sentence: str
) -> None:
    history = tmp_path / "history.jsonl"
    event = EventRecord(attempt=1, time=0.0, reason="Takeover", message="", warning=False, source="s", number=1)
    history.write_bytes(to_lines(msgspec.structs.replace(event, number=number) for number in range(2000)))
    arguments = ["history", str(history)] if command == "history" else [command]
    shell = ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "-"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [*shell, *BAMBOO, *arguments], capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    if redirection == "| true":
        assert done.returncode in (0, 1)  # as one that is told with SIGPIPE may
        assert done.stderr == ""
    else:
        assert (done.returncode, done.stderr) == (code, sentence)
