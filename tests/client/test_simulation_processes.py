"""The processes in which `bamboo simulate` and `bamboo plan` simulate: their end by signals or with the command."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
import yaml

from bamboo.simulation.processes import in_processes
from bamboo_core.names import EXIT_INTERRUPTED, EXIT_USAGE
from job_simulation_kit import manifest

PATIENCE = 120.0  # seconds, of a very slow machine
SIMULATE = ["--profile", "bert-v100", "--preempt-rate", "0.5", "--hours", "5000", "--seeds", "8"]


def members(group: int) -> list[int]:
    """Return the pids of a process group, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


def until_there_are(group: int, least: int, most: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not least <= len(members(group)) <= most:
        assert time.monotonic() < deadline, f"{len(members(group))} processes, expected {least} to {most}"
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `bamboo simulate` with two worker processes, all in a new process group, and kill the group at the end."""
    document = manifest(12, 4, 48)
    document["spec"]["training"]["steps"] = 100_000_000
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        [sys.executable, "-m", "bamboo", "simulate", "job.yaml", *SIMULATE, "--jobs", "2"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
    )
    try:
        until_there_are(process.pid, min(3, 1 + (os.cpu_count() or 1)), 3)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one processor there is one process")
def test_a_signal_ends_all_processes(tmp_path: Path) -> None:
    """SIGINT for the whole group, as a terminal sends it, ends all processes without a traceback."""
    with running(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == EXIT_INTERRUPTED
        assert b"Traceback" not in output + errors
        until_there_are(process.pid, 0, 0)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def naps(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_results_that_nobody_wants_end_the_processes() -> None:
    """The caller drops the results while some items run and others wait. If a thread raises, pytest fails the test."""
    assert list(in_processes(naps, [], 2)) == []
    results = in_processes(naps, [0.0, *[PATIENCE] * 7], 2)
    assert next(results) == 0.0
    del results
    assert not active_children()


def test_an_exception_of_the_work_is_raised_at_its_item() -> None:
    results = in_processes(naps, [0.1, -1.0, 0.0], 2)
    assert next(results) == 0.1
    with pytest.raises(ValueError, match="non-negative"):
        next(results)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one processor there is one process")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """The worker processes end even if the process that started them is killed."""
    with running(tmp_path) as process:
        process.kill()
        until_there_are(process.pid, 0, 0)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one processor there is one process")
def test_a_process_that_is_killed_gets_one_sentence(tmp_path: Path) -> None:
    """SIGKILL for a worker process, as the kernel sends it when memory runs out, ends the command with one sentence."""
    with running(tmp_path) as process:
        os.kill(next(pid for pid in members(process.pid) if pid != process.pid), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
        told = errors.splitlines()[-1]  # after a warning about the machine's memory
        assert told.startswith(b"bamboo: a process that simulated was killed, perhaps for want of memory;")
        assert b"Traceback" not in errors
        assert process.returncode == EXIT_USAGE
