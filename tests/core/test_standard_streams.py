"""What is printed while nobody reads it, to a full disk, to a closed stream, and in letters that the locale lacks."""

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from bamboo_core import standard_streams
from bamboo_core.history.records import EventRecord, to_lines
from bamboo_core.standard_streams import MOST_WAITING, SHOWN, Unhurried

BAMBOO = [sys.executable, "-c", "from bamboo.cli.commands import main; main()"]
SECONDS = 60.0
LINE = b"x" * 1023 + b"\n"
LEFT_OUT = re.compile(rb"\n\[(\d+) bytes are left out here: they were not read\]\n")


class Lost:
    """Hears that a stream is lost."""

    def __init__(self) -> None:
        self.errors: list[OSError] = []
        self.told = threading.Event()

    def __call__(self, error: OSError) -> None:
        self.errors.append(error)
        self.told.set()


def read_all(end: int) -> bytes:
    with open(end, "rb") as file:
        return file.read()


def test_who_does_not_read_holds_nobody_up_and_gets_everything_later() -> None:
    theirs, ours = os.pipe()
    stream = Unhurried(ours, Lost())
    lines = [b"%06d" % number + LINE for number in range(500)]  # several times what a pipe holds
    for line in lines:
        assert stream.write(line) == len(line)
    reader: list[bytes] = []
    reading = threading.Thread(target=lambda: reader.append(read_all(theirs)))
    reading.start()
    stream.finish(SECONDS)
    os.close(ours)
    reading.join()
    assert reader == [b"".join(lines)]


def test_of_too_much_the_newest_is_kept_and_the_rest_counted() -> None:
    theirs, ours = os.pipe()
    stream = Unhurried(ours, Lost())
    number = 3 * MOST_WAITING // len(LINE)
    for n in range(number):
        stream.write(b"%06d" % n + LINE)
    reader: list[bytes] = []
    reading = threading.Thread(target=lambda: reader.append(read_all(theirs)))
    reading.start()
    stream.finish(SECONDS)
    os.close(ours)
    reading.join()
    kept = LEFT_OUT.sub(b"", reader[0])
    left_out = [int(count) for count in LEFT_OUT.findall(reader[0])]  # more than one if the reader is slow
    assert left_out
    assert len(kept) + sum(left_out) == number * (len(LINE) + 6)
    assert kept.endswith(b"%06d" % (number - 1) + LINE)


def test_who_takes_nothing_is_waited_for_only_so_long() -> None:
    theirs, ours = os.pipe()
    stream = Unhurried(ours, Lost())
    for _ in range(500):
        stream.write(LINE)
    stream.finish(0.01)
    stream.finish(SECONDS)  # it is given up
    os.close(theirs)


def test_a_reader_that_has_gone_is_told_once_and_costs_nothing() -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    lost = Lost()
    stream = Unhurried(ours, lost)
    assert stream.write(LINE) == len(LINE)
    assert lost.told.wait(SECONDS)
    assert stream.write(LINE) == len(LINE)
    stream.finish(SECONDS)
    assert [type(error) for error in lost.errors] == [BrokenPipeError]
    os.close(ours)


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
    ("redirection", "code", "said"),
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
    tmp_path: Path, command: str, unbuffered: str, redirection: str, code: int, said: str
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
        assert (done.returncode, done.stderr) == (code, said)
