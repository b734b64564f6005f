"""Batches read ahead by a thread or by processes: right contents, errors, and stuck or killed readers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from bamboo_trainer.data import Prefetched
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks import readers
from bamboo_trainer.tasks.readers import AT_ONCE_BYTES, MOST_AHEAD, MOST_AT_ONCE, BatchReader
from bamboo_trainer.tasks.task_errors import TaskError
from cluster.children import is_alive
from stage_kit import CONFIG, small_task
from waiting import PATIENCE, until


class Told:
    """A dataset whose batches hold process and thread ids. broken: fault by sample, "raise", "die" or "die once"."""

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


class Sleeping(Told):
    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self.pid:
            (self.folder / f"asleep-{os.getpid()}").touch()
            time.sleep(600)
        return super().batch(indices)


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


def test_a_killed_reader_is_replaced_and_one_that_always_dies_is_an_error(tmp_path):
    data = Told(tmp_path)
    data.broken = {CONFIG.samples(1, 0, range(1000))[0]: "die once", CONFIG.samples(2, 0, range(1000))[0]: "die"}
    with reading(data, readers=2) as reader:
        reader.batch(0, 0, 0)
        reader.expect(0, [(1, 0)])
        assert tuple(reader.batch(0, 1, 0)[0][0].tolist()) == CONFIG.samples(1, 0, range(1000))
        reader.expect(0, [(2, 0)])
        with pytest.raises(TaskError, match="3 reader processes were killed"):
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
import stage_kit, test_readers
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.data import Prefetched
data = test_readers.Sleeping(Path(sys.argv[1])); data.pid = os.getpid()
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
            assert [name for name in held if name.startswith("socket:")] == []
        os.kill(readers[0], signal.SIGSTOP)
        worker.send_signal(how)
        worker.wait()
        with link:
            link.settimeout(PATIENCE)
            assert link.recv(1) == b""
    for reader in readers:
        until(lambda reader=reader: not is_alive(reader))


SECONDS = 60.0


@dataclass
class Slow:
    """A dataset that records its calls, blocks until `may_go` is set, and raises OSError if it is `broken`."""

    may_go: threading.Event = field(default_factory=threading.Event)
    inside: threading.Event = field(default_factory=threading.Event)
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    broken: bool = False

    def __len__(self) -> int:
        return 1000

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.note(indices)
        self.inside.set()
        assert self.may_go.wait(SECONDS)
        self.at_once -= 1
        if self.broken:
            raise OSError("the disk is gone")
        return (torch.tensor(indices),), (torch.tensor(indices) + 1,)

    def note(self, indices: Sequence[int]) -> None:
        self.calls.append((threading.current_thread().name, tuple(indices)))

    def read_ahead(self) -> list[bool]:
        """Return, for each call, whether the background thread made it."""
        return [name.startswith("data-reader") for name, _ in self.calls]


@pytest.fixture
def data():
    return Slow()


@pytest.fixture
def reader(data):
    reader = BatchReader(small_task(dataset=data), CONFIG.samples)
    data.may_go.set()
    reader.batch(0, 9, 0)  # the first one is never read ahead
    for event in (data.may_go, data.inside):
        event.clear()
    data.calls.clear()
    yield reader
    data.may_go.set()
    reader.close()


def test_what_is_expected_is_read_before_it_is_asked_for(reader: BatchReader, data: Slow) -> None:
    reader.expect(0, [(0, 1)])
    assert data.inside.wait(SECONDS), "nobody reads"
    data.may_go.set()
    (inputs,), (targets,) = reader.batch(0, 0, 1)
    assert inputs.tolist() == list(CONFIG.samples(0, 1, range(1000)))
    assert torch.equal(targets, inputs + 1)
    assert len(data.calls) == 1
    assert data.calls[0][0].startswith("data-reader")
    assert torch.equal(reader.batch(0, 0, 1)[0][0], inputs), "asked again, it is read again"
    assert data.calls[1] == (threading.current_thread().name, data.calls[0][1])


def test_the_dataset_is_called_by_one_thread_at_a_time(reader: BatchReader, data: Slow) -> None:
    reader.expect(0, [(0, 0)])
    assert data.inside.wait(SECONDS)
    threading.Timer(0.05, data.may_go.set).start()
    reader.batch(0, 0, 2)
    assert data.most_at_once == 1


def test_each_stage_has_what_it_expected(reader: BatchReader, data: Slow) -> None:
    data.may_go.set()
    reader.expect(3, [(0, 0)])
    one, other = reader.batch(0, 0, 0)[0][0], reader.batch(3, 0, 0)[0][0]
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()


class Drawing(Slow):
    """A dataset that seeds torch's generator with a batch's first sample number, and draws the batch from it."""

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        self.note(indices)
        torch.manual_seed(indices[0])
        noise = torch.rand(len(indices))
        return (noise,), (noise,)


def test_a_dataset_that_draws_from_torchs_generator_is_never_read_ahead() -> None:
    data = Drawing()
    reader = BatchReader(small_task(dataset=data), CONFIG.samples)
    reader.expect(0, [(0, 0)])
    expected = reader.batch(0, 0, 0)
    reader.expect(0, [(0, 0)])
    torch.manual_seed(7)
    alone = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), alone)
    assert torch.equal(reader.batch(0, 0, 0)[0][0], expected[0][0])
    assert data.read_ahead() == [False, False]
    reader.close()


def test_small_batches_are_read_several_at_once_and_each_is_there_when_it_is_read(
    reader: BatchReader, data: Slow
) -> None:
    """The background thread reads several small batches at a time, since waking it takes longer than reading one."""
    coming = [(step, m) for step in range(MOST_AT_ONCE) for m in range(3)]
    reader.expect(0, coming)
    assert data.inside.wait(SECONDS)
    reader.expect(0, coming)  # nothing new: the next one is on its way
    data.may_go.set()
    for step, m in coming[:MOST_AT_ONCE]:
        assert reader.batch(0, step, m)[0][0].tolist() == list(CONFIG.samples(step, m, range(1000)))
    assert [indices for _, indices in data.calls] == [
        CONFIG.samples(*one, range(1000)) for one in coming[:MOST_AT_ONCE]
    ]
    reader.expect(0, coming[MOST_AT_ONCE:])
    for step, m in coming[MOST_AT_ONCE : 2 * MOST_AT_ONCE + 1]:
        reader.batch(0, step, m)
    assert data.read_ahead() == [True] * 2 * MOST_AT_ONCE + [False]


@dataclass
class Large(Slow):
    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        self.note(indices)
        return (torch.empty(AT_ONCE_BYTES // 2),), (torch.empty(1),)


def test_large_batches_are_read_one_at_a_time() -> None:
    data = Large()
    reader = BatchReader(small_task(dataset=data), CONFIG.samples)
    reader.batch(0, 0, 0)
    reader.expect(0, [(1, 0), (1, 1)])
    for microbatch in (0, 1):
        reader.batch(0, 1, microbatch)
    assert data.read_ahead() == [False, True, False]
    reader.close()


def test_an_error_is_raised_where_the_batch_is_asked_for(reader: BatchReader, data: Slow) -> None:
    data.broken = True
    data.may_go.set()
    reader.expect(0, [(3, 0)])
    with pytest.raises(TaskError, match="OSError: the disk is gone"):
        reader.batch(0, 3, 0)


def test_what_is_never_asked_for_does_not_pile_up(reader: BatchReader, data: Slow) -> None:
    data.may_go.set()
    steps = range(20 * MOST_AHEAD * MOST_AT_ONCE)
    for step in steps:
        reader.expect(0, [(step, 0)])
    for step in steps[-2 * MOST_AHEAD * MOST_AT_ONCE :]:
        reader.batch(0, step, 0)
    assert data.read_ahead().count(False) == MOST_AHEAD * MOST_AT_ONCE, "the older ones are read again"


def test_close_does_not_wait_for_a_stuck_dataset(reader: BatchReader, data: Slow) -> None:
    reader.expect(0, [(0, 0)])
    assert data.inside.wait(SECONDS)
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < SECONDS / 2
