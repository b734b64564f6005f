"""Several readers: the same batches in the same order, whatever becomes of the processes that read them."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.task_errors import TaskError
from reader_kit import PATIENCE, Sleeping, Told, reading, until
from stage_kit import CONFIG


def test_batches_come_from_several_readers_and_are_those_that_were_asked_for(tmp_path):
    data = Told(tmp_path)
    with reading(data, readers=3, ahead=6) as reader:
        reader.batch(0, 99, 0)
        data.meet = True
        wanted = [(step, m) for step in range(4) for m in range(3)]
        for step, m in wanted:
            reader.expect(0, [(step, m)])
        makers = set()
        for step, m in reversed(wanted):
            (numbers, who), targets = reader.batch(0, step, m)
            assert tuple(numbers.tolist()) == CONFIG.samples(step, m, range(1000))
            assert targets[0].dtype == torch.bool
            assert torch.equal(targets[1], numbers.to(torch.bfloat16) / 3)
            assert targets[2].shape == (len(numbers), 0)
            makers.add(tuple(who.tolist()))
        assert len(makers) > 1
        assert os.getpid() not in {pid for pid, _ in makers}


def test_what_a_reader_raises_is_told_in_one_sentence_where_the_batch_is_asked_for(tmp_path):
    data = Told(tmp_path)
    data.broken[CONFIG.samples(5, 0, range(1000))[0]] = "raise"
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, [(5, 0)])
        reader.expect(0, [(5, 1)])
        with pytest.raises(TaskError, match=r"^the dataset, asked for samples \[.*raised OSError: the disk is gone"):
            reader.batch(0, 5, 0)
        assert tuple(reader.batch(0, 5, 1)[0][0].tolist()) == CONFIG.samples(5, 1, range(1000))


def test_close_does_not_wait_for_stuck_readers_and_reaps_them(tmp_path):
    data = Sleeping(tmp_path)
    data.pid = os.getpid()
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        for m in range(2):
            reader.expect(0, [(1, m)])
        asleep = until(lambda: len(found := list(tmp_path.glob("asleep-*"))) == 2 and found)
    for mark in asleep:
        assert not Path(f"/proc/{mark.name.partition('-')[2]}").exists()


def test_what_a_model_of_the_library_makes_of_its_data_is_read_by_their_readers(tmp_path, monkeypatch):
    (tmp_path / "pid_tokens.py").write_text(
        "import os, torch\n"
        "class Tokens:\n"
        "    def __len__(self): return 1000\n"
        "    def batch(self, indices):\n"
        "        ids = torch.full((len(indices), 8), os.getpid() % 97)\n"
        "        return (ids,), (ids,)\n"
        "def build(config): return Tokens()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"vocabulary": 97, "positions": 8, "width": 8, "heads": 2, "blocks": 1}
    data = {"kind": "own", "entrypoint": "pid_tokens:build", "readers": 2}
    task = load_task("bamboo_trainer.models.gpt2:build", {**sizes, "data": data})
    reader = BatchReader(task, CONFIG.samples)
    try:
        makers = {int(reader.batch(0, 0, 0)[0][0][0, 0])}
        for step in range(1, 9):
            reader.expect(0, [(step, 0)])
            makers.add(int(reader.batch(0, step, 0)[0][0][0, 0]))
    finally:
        reader.close()
    assert len(makers) > 1, "the first batch is read here"


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


def test_a_reader_that_is_stuck_is_told_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "SILENT_SECONDS", 1.0)
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
