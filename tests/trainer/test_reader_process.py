"""Processes that read: killed, stuck, left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.reading import reader_process
from bamboo_trainer.tasks.task_errors import TaskError
from reader_kit import PATIENCE, Sleeping, Told, reading, until
from stage_kit import CONFIG


def test_a_killed_reader_is_replaced_and_one_that_always_dies_is_an_error(tmp_path):
    data = Told(tmp_path)
    data.broken = {CONFIG.samples(1, 0, range(1000))[0]: "die once", CONFIG.samples(2, 0, range(1000))[0]: "die"}
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, [(1, 0)])
        assert tuple(reader.batch(0, 1, 0)[0][0].tolist()) == CONFIG.samples(1, 0, range(1000))
        reader.expect(0, [(2, 0)])
        with pytest.raises(TaskError, match=r"its reader process was ended by SIGKILL, and so did 2 others"):
            reader.batch(0, 2, 0)
        reader.expect(0, [(3, 0)])
        assert tuple(reader.batch(0, 3, 0)[0][0].tolist()) == CONFIG.samples(3, 0, range(1000))


class Locked(Told):
    """Takes a lock for each batch, as torch's generators and allocators do."""

    lock = threading.Lock()

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        with self.lock:
            return super().batch(indices)


def relatives() -> list[tuple[int, int]]:
    """(process, parent) of all processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid, _, rest = stat.read_text().rpartition(")")
            found.append((int(pid.split()[0]), int(rest.split()[1])))
    return found


def children() -> set[int]:
    """Of this process, which may have some of other tests."""
    return {process for process, parent in relatives() if parent == os.getpid()}


@pytest.mark.parametrize("killed", ["reader", "template"])
def test_a_reader_is_replaced_while_the_worker_holds_a_lock_that_it_needs(tmp_path, monkeypatch, killed):
    monkeypatch.setattr(reader_process, "SILENT_SECONDS", PATIENCE)
    before = children()
    with reading(Locked(tmp_path), readers=1) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, [(0, 1)])
        pid = int(reader.batch(0, 0, 1)[0][1][0])
        template = dict(relatives())[pid]
        os.kill(pid if killed == "reader" else template, signal.SIGKILL)
        until(lambda: _is_zombie(pid))
        with Locked.lock if killed == "reader" else nullcontext():
            reader.expect(0, [(1, 0)])
            (numbers, who), _ = reader.batch(0, 1, 0)
        assert tuple(numbers.tolist()) == CONFIG.samples(1, 0, range(1000))
        assert int(who[0]) not in (pid, os.getpid())
    assert children() <= before


def test_a_reader_that_is_stuck_is_told_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_process, "SILENT_SECONDS", 1.0)
    data = Sleeping(tmp_path)
    data.pid = os.getpid()
    with reading(data, readers=1) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, [(1, 0)])
        with pytest.raises(TaskError, match=r"asked for samples \[.*has not answered within 1 s: its reader"):
            reader.batch(0, 1, 0)


SCRIPT = """
import os, sys, signal, socket, time
from pathlib import Path
sys.path[:0] = {path!r}
import reader_kit, stage_kit
from bamboo_trainer.tasks.reading import reader_process
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.data import Prefetched
data = reader_kit.Sleeping(Path(sys.argv[1])); data.pid = os.getpid()
link = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
reader = BatchReader(stage_kit.small_task(dataset=Prefetched(data, readers=2)), stage_kit.CONFIG.samples)
reader.batch(0, 0, 0)
for m in range(2): reader.expect(0, [(1, m)])
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_readers_end_with_the_worker_and_hold_none_of_its_connections(tmp_path, how):
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = SCRIPT.format(path=[path for path in sys.path if path])
        arguments = [sys.executable, "-c", script, str(tmp_path), str(server.getsockname()[1])]
        worker = subprocess.Popen(arguments)
        link, _ = server.accept()
        marks = until(lambda: len(found := list(tmp_path.glob("asleep-*"))) == 2 and found)
        readers = [int(mark.name.partition("-")[2]) for mark in marks]
        for reader in readers:
            held = [os.readlink(entry) for entry in Path(f"/proc/{reader}/fd").iterdir()]
            assert len([name for name in held if name.startswith("socket:")]) == 1, held
        os.kill(readers[0], signal.SIGSTOP)
        worker.send_signal(how)
        worker.wait()
        with link:
            link.settimeout(PATIENCE)
            assert link.recv(1) == b""
    for reader in readers:
        until(lambda reader=reader: not Path(f"/proc/{reader}").exists() or _is_zombie(reader))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
