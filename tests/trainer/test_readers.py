"""Several readers: the same batches in the same order, whatever becomes of the processes that read them."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from bamboo_trainer.data import Prefetched
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.reading import reader_process
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, small_task

PATIENCE = 120.0


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


class Told:
    """Says which process made a batch. broken: sample numbers that raise, or end the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broken: dict[int, str] = {}
        self.meet = False  # nobody is done before two have begun

    def __len__(self) -> int:
        return 1000

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        for index in indices:
            match self.broken.get(index):
                case "raise":
                    raise OSError("the disk is gone")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "die once" if not (self.folder / "died").exists():
                    (self.folder / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        who = torch.tensor([os.getpid(), threading.get_native_id()])
        if self.meet:
            (self.folder / f"in-{'-'.join(map(str, who.tolist()))}").touch()
            until(lambda: len(list(self.folder.glob("in-*"))) > 1)
        numbers = torch.tensor(indices)
        return (numbers, who), (numbers.bool(), numbers.to(torch.bfloat16) / 3, torch.empty(len(indices), 0))


@contextmanager
def reading(dataset, **options):
    reader = BatchReader(small_task(dataset=Prefetched(dataset, **options)), CONFIG.samples)
    try:
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("processes", [True, False])
def test_batches_come_from_several_readers_and_are_those_that_were_asked_for(tmp_path, processes):
    data = Told(tmp_path)
    with reading(data, readers=3, ahead=6, processes=processes) as reader:
        reader.batch(0, 99, 0)
        data.meet = True
        wanted = [(step, m) for step in range(4) for m in range(3)]
        for step, m in wanted:
            reader.expect(0, step, m)
        makers = set()
        for step, m in reversed(wanted):
            (numbers, who), targets = reader.batch(0, step, m)
            assert tuple(numbers.tolist()) == CONFIG.samples(step, m, 1000)
            assert targets[0].dtype == torch.bool
            assert torch.equal(targets[1], numbers.to(torch.bfloat16) / 3)
            assert targets[2].shape == (len(numbers), 0)
            makers.add(tuple(who.tolist()))
        assert len(makers) > 1
        assert (os.getpid() in {pid for pid, _ in makers}) is not processes


def test_the_check_before_the_first_step_compares_with_what_a_reader_makes(tmp_path):
    with reading(Told(tmp_path), readers=1) as reader:
        (first, again) = reader.twice(0, 0, 0)
        assert first[0][1][0] == os.getpid() != again[0][1][0]
        assert reader.batch(0, 0, 0) is first


def test_what_a_reader_raises_is_told_in_one_sentence_where_the_batch_is_asked_for(tmp_path):
    data = Told(tmp_path)
    data.broken[CONFIG.samples(5, 0, 1000)[0]] = "raise"
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, 5, 0)
        reader.expect(0, 5, 1)
        with pytest.raises(TaskError, match=r"^the dataset, asked for samples \[.*raised OSError: the disk is gone"):
            reader.batch(0, 5, 0)
        assert tuple(reader.batch(0, 5, 1)[0][0].tolist()) == CONFIG.samples(5, 1, 1000)


def test_a_killed_reader_is_replaced_and_one_that_always_dies_is_an_error(tmp_path):
    data = Told(tmp_path)
    data.broken = {CONFIG.samples(1, 0, 1000)[0]: "die once", CONFIG.samples(2, 0, 1000)[0]: "die"}
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, 1, 0)
        assert tuple(reader.batch(0, 1, 0)[0][0].tolist()) == CONFIG.samples(1, 0, 1000)
        reader.expect(0, 2, 0)
        with pytest.raises(TaskError, match=r"its reader process was ended by SIGKILL, and so did 2 others"):
            reader.batch(0, 2, 0)
        reader.expect(0, 3, 0)
        assert tuple(reader.batch(0, 3, 0)[0][0].tolist()) == CONFIG.samples(3, 0, 1000)


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
        (_, again) = reader.twice(0, 0, 0)
        pid = int(again[0][1][0])
        template = dict(relatives())[pid]
        os.kill(pid if killed == "reader" else template, signal.SIGKILL)
        until(lambda: _is_zombie(pid))
        with Locked.lock if killed == "reader" else nullcontext():
            reader.expect(0, 1, 0)
            (numbers, who), _ = reader.batch(0, 1, 0)
        assert tuple(numbers.tolist()) == CONFIG.samples(1, 0, 1000)
        assert int(who[0]) not in (pid, os.getpid())
    assert children() <= before


def test_a_reader_that_is_stuck_is_told_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_process, "SILENT_SECONDS", 1.0)
    data = Sleeping(tmp_path)
    data.pid = os.getpid()
    with reading(data, readers=1) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, 1, 0)
        with pytest.raises(TaskError, match=r"asked for samples \[.*has not answered within 1 s: its reader"):
            reader.batch(0, 1, 0)


class Unseeded(Told):
    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        torch.rand(1)
        return super().batch(indices)


def test_a_dataset_that_draws_from_torchs_generator_gets_no_readers(tmp_path):
    with reading(Unseeded(tmp_path), readers=2) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, 1, 0)
        assert reader.batch(0, 1, 0)[0][1][0] == os.getpid()
        assert reader.twice(0, 2, 0)[1][0][1][0] == os.getpid()


class Sleeping(Told):
    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self.pid:
            (self.folder / f"asleep-{os.getpid()}").touch()
            time.sleep(600)
        return super().batch(indices)


def test_close_does_not_wait_for_stuck_readers_and_reaps_them(tmp_path):
    data = Sleeping(tmp_path)
    data.pid = os.getpid()
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        for m in range(2):
            reader.expect(0, 1, m)
        asleep = until(lambda: len(found := list(tmp_path.glob("asleep-*"))) == 2 and found)
    for mark in asleep:
        assert not Path(f"/proc/{mark.name.partition('-')[2]}").exists()


SCRIPT = """
import os, sys, signal, socket, time
from pathlib import Path
sys.path[:0] = {path!r}
import test_readers as kit
from bamboo_trainer.tasks.reading import reader_process
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.data import Prefetched
data = kit.Sleeping(Path(sys.argv[1])); data.pid = os.getpid()
link = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
reader = BatchReader(kit.small_task(dataset=Prefetched(data, readers=2)), kit.CONFIG.samples)
reader.batch(0, 0, 0)
for m in range(2): reader.expect(0, 1, m)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
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


def test_the_dataset_may_draw_from_a_generator_of_its_own(tmp_path):
    class Augmented(Told):
        def batch(self, indices):
            noise = torch.tensor([random.Random(i).random() for i in indices])
            return (noise,), (noise,)

    with reading(Augmented(tmp_path), readers=2) as reader:
        here = reader.batch(0, 1, 0)
        reader.expect(0, 1, 0)
        assert torch.equal(reader.batch(0, 1, 0)[0][0], here[0][0])


@pytest.mark.parametrize(("options", "said"), [({"readers": 0}, "readers must be from 1"), ({"ahead": 0}, "readAhead")])
def test_numbers_that_cannot_be_are_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        Prefetched(Told(tmp_path), **options)
