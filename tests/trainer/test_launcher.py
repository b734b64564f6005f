"""The fork server: its imports, and workers that it cannot start."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bamboo_trainer.worker.launcher import HUGE_PAGES, lasting_imports

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


UNABLE_TO_FORK = """
import errno, os
from bamboo_trainer.worker import launcher

def refuse():
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

os.fork = refuse
launcher.main()
"""


START = {"op": "start", "worker": "w1", "url": "", "token": "", "zone": "", "gate": [5]}
CALL = {"op": "call", "id": 3, "function": "os:getpid", "arguments": {}}
FULL = "no process can be started: Resource temporarily unavailable"


def test_a_worker_or_a_call_that_cannot_be_started_is_reported() -> None:
    command = [sys.executable, "-c", UNABLE_TO_FORK, "--bare"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(b"".join(json.dumps(one).encode() + b"\n" for one in (START, CALL)))
        server.stdin.flush()
        ready, *events = [json.loads(server.stdout.readline()) for _ in range(3)]
        assert ready == {"event": "ready"}
        exited, failed = {"event": "exited", "worker": "w1", "code": 1}, {"event": "result", "id": 3, "error": FULL}
        assert events == [exited, failed]
