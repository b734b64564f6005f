"""The fork server: its imports, its sockets, and where a child crashed."""

import gc
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bamboo_trainer.worker import launcher
from bamboo_trainer.worker.launcher import HUGE_PAGES, Gates, crash_place, lasting_imports

LARGE = """
from bamboo_trainer.worker.launcher import lasting_imports
with lasting_imports():
    import torch
tensor, mapped = torch.empty(8 << 20), False
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition("-")
    if rest and not line[0].isupper():
        mapped = int(first, 16) <= tensor.data_ptr() < int(rest.split()[0], 16)
    elif mapped and line.startswith("VmFlags:"):
        print("hg" in line.split())
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize(("told", "expected"), [(None, "True"), ("0", "False")])
def test_large_tensors_are_in_huge_pages_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, told: str | None, expected: str
) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    if told is not None:
        monkeypatch.setenv(HUGE_PAGES, told)
    found = subprocess.run([sys.executable, "-c", LARGE], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    assert found.stdout.split() == [expected]


def test_what_is_imported_is_never_looked_through_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HUGE_PAGES, "0")  # so that this process keeps what it has
    before = gc.get_freeze_count()
    with lasting_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


SECONDS = 60.0  # that a test waits for something
UNABLE_TO_FORK = """
import errno, os
from bamboo_trainer.worker import launcher

def refuse():
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

os.fork = refuse
launcher.main()
"""


def test_two_workers_that_end_at_the_same_time_do_not_end_the_launcher() -> None:
    """The launcher reaps both workers at the first event, when the second worker's closed socket is reported, too."""
    with selectors.DefaultSelector() as selector:
        gates = Gates(selector, lambda worker, step: None)
        gates.open("w1").close()
        ((told, _),) = selector.select(SECONDS)
        gates.close("w1")
        told.data()
        assert dict(selector.get_map()) == {}


def test_a_worker_that_cannot_be_started_leaves_no_socket() -> None:
    start = {"op": "start", "worker": "w1", "url": "", "token": "", "zone": "", "gate": [5]}
    command = [sys.executable, "-c", UNABLE_TO_FORK, "--bare"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(start).encode() + b"\n")
        server.stdin.flush()
        events = [json.loads(server.stdout.readline()) for _ in range(2)]
        assert events == [{"event": "ready"}, {"event": "exited", "worker": "w1", "code": 1}]
        files = f"/proc/{server.pid}/fd"
        assert [link for fd in os.listdir(files) if (link := os.readlink(f"{files}/{fd}")).startswith("socket:")] == []


@pytest.mark.parametrize(
    ("files", "place"),
    [
        (
            [torch.__file__, "/home/me/layers.py", "/home/me/task.py", launcher.__file__],
            ", /home/me/layers.py line 2, in f2",
        ),
        ([torch.__file__, launcher.__file__], ""),
    ],
)
def test_a_crash_is_placed_at_the_innermost_frame_of_user_code(files: list[str], place: str) -> None:
    frames = "".join(f'  File "{file}", line {number} in f{number}\n' for number, file in enumerate(files, start=1))
    dump = f"Fatal Python error: Bus error\n\nCurrent thread 0x0001:\n{frames}\nExtension modules: numpy\n"
    assert crash_place(dump) == f"Bus error{place}"


def test_a_dump_that_is_no_crash_has_no_place() -> None:
    assert crash_place("Timeout (0:00:10)!\n") == ""
