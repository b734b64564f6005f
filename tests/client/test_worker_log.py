"""The log of workers: lines with time, worker and step, and the follower of the file."""

import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bamboo.local.views.worker_log import LogFollower
from bamboo_trainer.worker.process import Printed

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_what_is_printed_comes_line_by_line_with_time_worker_and_step() -> None:
    out = io.StringIO()
    step: list[int | None] = [None]
    printed = Printed(out, "w3", lambda: step[0])
    print("a", end="", file=printed)
    assert out.getvalue() == ""
    print("b\nc", file=printed)
    step[0] = 12
    for percent in range(100):  # a progress bar
        print(f"\r{percent} %", end="", file=printed)
    print(file=printed)
    print("no end", end="", file=printed)
    printed.close()
    lines = [re.sub(f"^{STAMP} ", "", line) for line in out.getvalue().splitlines()]
    assert lines == ["w3 step - | ab", "w3 step - | c", "w3 step 12 | 99 %", "w3 step 12 | no end"]
    assert re.fullmatch(rf"{STAMP} w3 step - \| ab", out.getvalue().splitlines()[0])


def test_threads_print_lines_of_their_own() -> None:
    out = io.StringIO()
    printed = Printed(out, "w0", lambda: 1)
    print("loss ", end="", file=printed)
    for text in ("reading\n", "no end"):
        other = threading.Thread(target=printed.write, args=(text,))
        other.start()
        other.join()
    print("0.5", file=printed)
    printed.close()
    assert [line.rpartition(" | ")[2] for line in out.getvalue().splitlines()] == ["reading", "loss 0.5", "no end"]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    out = io.StringIO()
    printed = Printed(out, "w0", lambda: 1)
    for _ in range(3):
        printed.write("x" * 60_000)
    assert out.getvalue().count("\n") == 1
    assert len(out.getvalue()) > 120_000


PROGRAM = """
import logging, sys
from bamboo_trainer.worker import process
process.begin_log("w1", lambda: 7, shared={shared})
logging.getLogger("theirs").info("information")
logging.getLogger("bamboo_trainer.x").info("chatter")
logging.basicConfig(level=logging.DEBUG)  # as users do: it changes nothing
logging.getLogger("theirs").debug("detail")
print("printed")
sys.stdout.flush()
sys.stderr.write("complained\\n")
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.buffer.flush()
import ctypes
ctypes.string_at(0)
"""


def ran(shared: bool) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(shared=shared)], capture_output=True, text=True)
    assert done.returncode == -11
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_every_line_of_a_log_that_workers_share_says_whose_it_is() -> None:
    lines = ran(shared=True)
    assert [re.sub(STAMP, "T", line) for line in lines[:2]] == ["T w1 step 7 | printed", "bytes"]
    assert re.fullmatch(rf"{STAMP},\d\d\d INFO w1 step 7 theirs: information", lines[2])
    assert re.fullmatch(rf"{STAMP} w1 step 7 \| complained", lines[3])
    assert "Segmentation fault" in lines[4], "where a crash happened is in the log, too"
    assert any("string_at" in line for line in lines)


def test_what_a_task_prints_in_a_pod_stays_as_it_is() -> None:
    lines = ran(shared=False)
    assert lines[:2] == ["printed", "bytes"]
    assert re.fullmatch(rf"{STAMP},\d\d\d INFO w1 step 7 theirs: information", lines[2])
    assert re.fullmatch(rf"{STAMP},\d\d\d INFO w1 step 7 bamboo_trainer\.x: chatter", lines[3])
    assert lines[4] == "complained"
    assert lines[5].startswith("Fatal Python error: Segmentation fault")
    dump = "\n".join(lines[5:])
    assert dump.count("most recent call first") == 1, "only the thread that crashed, whose first frames are the user's"


def test_a_log_is_followed_a_piece_at_a_time_and_a_line_without_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bamboo.local.views.worker_log.CHUNK", 10)
    shown: list[str] = []
    file = tmp_path / "workers.log"
    follower = LogFollower(file, shown.append)
    assert not follower.follow(), "it is not there yet"
    file.write_text("one\ntwo\nthree\nfour")
    assert follower.follow()
    assert shown == ["one\ntwo\n"]
    file.write_text("one\ntwo\nthree\nfour" + 40 * "." + "\nend")
    for _ in range(5):
        follower.follow()
    assert "".join(shown).startswith("one\ntwo\nthree\nfour....."), "also before the line has an end"
    follower.end()
    assert "".join(shown) == file.read_text()
