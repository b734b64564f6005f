"""The fork server ends no job when its workers end."""

import json
import os
import selectors
import subprocess
import sys

from bamboo_trainer.worker.launch.launcher import Gates

SECONDS = 60.0  # that a test waits for something
UNABLE_TO_FORK = """
import errno, os
from bamboo_trainer.worker.launch import launcher

def refuse():
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

os.fork = refuse
launcher.main()
"""


def test_two_workers_that_end_at_the_same_time_do_not_end_the_launcher() -> None:
    """All that have ended are reaped at the first word of one, when the second one's closed socket was told of, too."""
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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        launcher.stdin.write(json.dumps(start).encode() + b"\n")
        launcher.stdin.flush()
        events = [json.loads(launcher.stdout.readline()) for _ in range(2)]
        assert events == [{"event": "ready"}, {"event": "exited", "worker": "w1", "code": 1}]
        files = f"/proc/{launcher.pid}/fd"
        assert [link for fd in os.listdir(files) if (link := os.readlink(f"{files}/{fd}")).startswith("socket:")] == []
