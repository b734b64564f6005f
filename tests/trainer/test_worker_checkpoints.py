"""A worker's checkpoints in a real store: written by one split of the layers, restored by another, bit for bit."""

import errno
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import DataRecord, LookedAt
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Message
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.storage.files import Buffer
from bamboo_core.storage.local_files import LocalFiles
from bamboo_trainer.checkpoint import worker_checkpoints
from bamboo_trainer.checkpoint.layer_file import RestoreError
from bamboo_trainer.checkpoint.worker_checkpoints import WorkerCheckpoints
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.training import TrainingConfig
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, SPLITS, chain, one_step, small_gpt, state_of
from stage_kit import at as precision

SECONDS = 120.0
LAYERS = 4  # of the model
DATA = DataRecord(samples=400, order="0" * 16, looked_at=(LookedAt(sample=0, form="int64 [8]", digest="a" * 16),))


BEGUN: list[WorkerCheckpoints] = []  # to be closed when the test is over


class Worker:
    """A worker with its checkpoints in a folder, and the messages that it sends to the coordinator."""

    def __init__(self, folder: Path, data: DataRecord = DATA, **options: Any) -> None:
        document = bamboojob(
            task={"entrypoint": "a.b:c"},
            training=training(9, 6, 2),
            topology={"stages": 2},
            checkpoint={"storage": f"file://{folder}", **options},
        )
        self.said: queue.Queue[Message] = queue.Queue()
        self.part = WorkerCheckpoints(parse_manifest(document), LAYERS, self.tell, data)

        BEGUN.append(self.part)

    def tell(self, message: Message) -> None:
        self.said.put(message)

    def hear(self) -> Any:
        return self.said.get(timeout=SECONDS)

    def save(self, stages: list[Stage], checkpoint: CheckpointId, disk: LocalFiles | None = None) -> None:
        """Write and commit a checkpoint. disk: the store's files; the worker must not have opened the store yet."""
        with pytest.MonkeyPatch.context() as patch:
            if disk is not None:
                patch.setattr(worker_checkpoints, "CheckpointStore", partial(CheckpointStore, files=disk))
            self._save(stages, checkpoint)

    def _save(self, stages: list[Stage], checkpoint: CheckpointId) -> None:
        parts, common = [], dict[str, Any]()
        for stage in stages:
            self.part.keep(checkpoint, stage.values.layer_states(), 0.25)
            for _ in stage.values.layers:
                told = self.hear()
                assert isinstance(told, protocol.PartsWritten)
                parts, common = [*parts, *told.parts], told.common
        self.part.obey(protocol.CommitCheckpoint(checkpoint=checkpoint, parts=tuple(parts), common=common))
        assert self.hear() == protocol.CheckpointCommitted(checkpoint=checkpoint)
        assert self.hear() == protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)

    def find(self, *bad: CheckpointId) -> Any:
        self.part.obey(protocol.FindCheckpoint(number=1, bad=bad))
        return self.hear()

    def settle(self) -> None:
        """Wait until the worker has done all work that was requested before."""
        self.part.obey(protocol.FindCheckpoint(number=2))
        while not isinstance(self.hear(), protocol.CheckpointFound):
            pass


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "kept"
    while BEGUN:
        BEGUN.pop().close()


def test_a_store_that_cannot_be_written_is_told_when_the_job_begins_and_once() -> None:
    worker = Worker(Path("/proc/nowhere/store"))
    assert worker.find() == protocol.CheckpointFound(number=1)
    warning = worker.hear()
    assert isinstance(warning, protocol.WorkerWarning)
    assert warning.reason == "CheckpointStoreNotWritable"
    assert warning.message.startswith("cannot write to /proc/nowhere/store: ")
    assert worker.find() == protocol.CheckpointFound(number=1)
    worker.part.close()
    assert worker.said.empty()


def trained(tmp_path: Path, split: int, steps: int, config: TrainingConfig = CONFIG) -> list[Stage]:
    stages = chain(small_gpt(tmp_path), SPLITS[split], config)
    for step in range(steps):
        one_step(stages, step, config)
    return stages


def at(step: int) -> CheckpointId:
    return CheckpointId(step=step, id=f"a{step}")


@pytest.mark.parametrize(("kept", "restored"), [(2, 4), (4, 1)])
def test_what_one_split_keeps_another_goes_on_from(tmp_path: Path, folder: Path, kept: int, restored: int) -> None:
    fp16 = precision("fp16")
    stages = trained(tmp_path, kept, 2, fp16)
    writer, reader = Worker(folder), Worker(folder)
    writer.save(stages, at(2))
    assert reader.find() == protocol.CheckpointFound(number=1, checkpoint=at(2))
    others = chain(small_gpt(tmp_path), SPLITS[restored], fp16)
    for stage in others:
        reader.part.restore(stage.values, at(2), {})
    assert [stage.values.version for stage in others] == [2] * restored
    scale = stages[0].values.common.loss_scale
    assert scale is not None
    assert (scale.good, {stage.values.common.loss_scale for stage in others}) == (2, {scale})
    losses = [(one_step(stages, step, fp16), one_step(others, step, fp16)) for step in (2, 3)]
    assert all(a == b for a, b in losses)
    here, there = state_of(stages), state_of(others)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_other_data_than_a_checkpoint_was_trained_with_are_told(tmp_path: Path, folder: Path) -> None:
    fewer, changed = replace(DATA, samples=300), replace(DATA, looked_at=(replace(DATA.looked_at[0], digest="b" * 16),))
    writer = Worker(folder, data=DATA)
    writer.save(trained(tmp_path, 2, 2), at(2))
    found = protocol.CheckpointFound(number=1, checkpoint=at(2))
    told = {
        "same": Worker(folder, data=DATA),
        "fewer": Worker(folder, data=fewer),
        "changed": Worker(folder, data=changed),
    }
    answers = {name: worker.find() for name, worker in told.items()}
    assert answers["same"] == found
    assert answers["fewer"] == replace(found, other_data="data with 400 samples, and the job's have 300 samples")
    a, b = "a" * 16, "b" * 16
    other = f"data with a sample 0 of digest {a}, and the job's have a sample 0 of digest {b}"
    assert answers["changed"] == replace(found, other_data=other)


def test_only_the_latest_are_kept(tmp_path: Path, folder: Path) -> None:
    stages = trained(tmp_path, 2, 1)
    worker = Worker(folder, keepLatest=2)
    for step in (1, 2, 3):
        worker.save(stages, at(step))
        one_step(stages, step)
    manifests = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert not [path for path in manifests if "a1" in path]
    assert [step for step in (2, 3) if any(f"a{step}" in path for path in manifests)] == [2, 3]
    assert worker.find(at(3)).checkpoint == at(2)


def test_a_damaged_part_is_told_as_such(tmp_path: Path, folder: Path) -> None:
    stages = trained(tmp_path, 1, 1)
    worker = Worker(folder)
    worker.save(stages, at(1))
    (part,) = (path for path in folder.rglob("layer-00001*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    (fresh,) = chain(small_gpt(tmp_path), SPLITS[1])
    with pytest.raises(RestoreError) as caught:
        worker.part.restore(fresh.values, at(1), {})
    assert (caught.value.checkpoint, caught.value.damaged) == (at(1), True)
    assert str(caught.value) == f"{part} has other contents than were written (its sha256 differs)"
    with pytest.raises(RestoreError):
        worker.part.restore(fresh.values, at(7), {})


def test_one_of_another_task_is_no_use_ever(tmp_path: Path, folder: Path) -> None:
    worker = Worker(folder)
    worker.save(trained(tmp_path, 1, 1), at(1))
    (other,) = chain(small_gpt(tmp_path, dModel=32), SPLITS[1])
    with pytest.raises(RestoreError, match="does not fit the task \\(was its code changed") as caught:
        worker.part.restore(other.values, at(1), {})
    assert caught.value.damaged


def test_a_store_that_cannot_be_written_fails_the_checkpoint_only(tmp_path: Path, folder: Path) -> None:
    folder.write_text("a file, where a folder should be")
    stages = trained(tmp_path, 1, 1)
    worker = Worker(folder)
    worker.part.keep(at(1), stages[0].values.layer_states(), 0.25)
    told = worker.hear()
    assert isinstance(told, protocol.CheckpointFailed)
    assert told.checkpoint == at(1)
    assert told.message
    worker.part.obey(protocol.CommitCheckpoint(checkpoint=at(1), parts=()))
    assert isinstance(worker.hear(), protocol.CheckpointFailed)
    assert worker.find().problem


def test_what_was_said_last_is_said_again(tmp_path: Path, folder: Path) -> None:
    worker = Worker(folder)
    worker.save(trained(tmp_path, 1, 1), at(1))
    assert worker.said.empty()
    worker.part.report()
    *parts, last, _ = [worker.hear() for _ in range(LAYERS + 2)]
    assert [part.layer for said in parts for part in said.parts] == list(range(LAYERS))
    assert last == protocol.CheckpointCommitted(checkpoint=at(1))


def test_no_thread_is_left(tmp_path: Path, folder: Path) -> None:
    before = set(threading.enumerate())
    worker = Worker(folder)
    worker.part.close()
    worker.find()
    worker.settle()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["checkpoints"]
    worker.part.close()
    assert not set(threading.enumerate()) - before


class Full(LocalFiles):
    """A disk that raises ENOSPC if its files would exceed `room` bytes."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.folder, self.room = root, sys.maxsize

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        used = sum(one.stat().st_size for one in self.folder.rglob("*") if one.is_file())
        if used + sum(memoryview(chunk).nbytes for chunk in chunks) > self.room:
            raise OSError(errno.ENOSPC, "full")
        super().write(path, chunks)


def test_what_did_not_fit_is_removed_so_that_the_next_one_fits(tmp_path: Path, folder: Path) -> None:
    """A worker whose part does not fit removes all parts of that checkpoint, to make room for later checkpoints."""
    stages = trained(tmp_path, 2, 1)
    worker, other = Worker(folder), Worker(folder)
    disk = Full(folder)
    worker.save(stages, at(1), disk)
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    ours, others = stages
    disk.room = size * 5 // 4
    other.part.keep(at(2), others.values.layer_states(), 0.0)
    for _ in others.values.layers:
        assert isinstance(other.hear(), protocol.PartsWritten)
    old = folder / CheckpointId(0, "dead").folder
    old.mkdir()
    (old / "layer-00000.safetensors").write_bytes(b"x")
    long_ago = time.time() - 2 * 3600.0
    os.utime(old / "layer-00000.safetensors", (long_ago, long_ago))
    worker.part.keep(at(2), ours.values.layer_states(), 0.0)
    said = worker.hear()
    while not isinstance(said, protocol.CheckpointFailed):
        said = worker.hear()
    assert "no space left" in said.message
    assert worker.find().checkpoint == at(1), "it is what is asked for next, when what is left has been removed"
    worker.settle()
    assert {one.name for one in folder.iterdir()} == {CheckpointId(1, "a1").folder}


class Slow(LocalFiles):
    """A store whose writes for one step wait until a test sets `may`."""

    def __init__(self, root: Path, step: int) -> None:
        super().__init__(str(root))
        self.step, self.begun, self.may = step, threading.Event(), threading.Event()

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        if path.startswith(f"step-{self.step:09d}"):
            self.begun.set()
            assert self.may.wait(SECONDS)
        super().write(path, chunks)


def test_an_end_awaits_no_store_that_hangs(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, worker, disk = trained(tmp_path, 1, 1), Worker(folder), Slow(folder, 9)
    worker.save(stages, at(1), disk)
    worker.part.keep(at(9), stages[0].values.layer_states(), 0.0)
    assert disk.begun.wait(SECONDS)
    for _ in range(worker_checkpoints.MOST_WAITING + 1):
        worker.part.obey(protocol.FindCheckpoint(number=1))
    monkeypatch.setattr(worker_checkpoints, "END_SECONDS", 0.0)
    threading.Timer(5.0, disk.may.set).start()
    worker.part.close()
    assert not disk.may.is_set()
    disk.may.set()


def test_a_worker_that_ends_commits_what_is_written_in_whole_and_removes_what_is_given_up(
    tmp_path: Path, folder: Path
) -> None:
    stages = trained(tmp_path, 2, 1)
    worker, other, disk = Worker(folder), Worker(folder), Slow(folder, 9)
    worker.save(stages, at(1), disk)
    other.part.keep(at(2), stages[1].values.layer_states(), 0.0)
    worker.part.keep(at(2), stages[0].values.layer_states(), 0.0)
    parts = [
        part
        for one, stage in zip((worker, other), stages, strict=True)
        for _ in stage.values.layers
        for part in one.hear().parts
    ]
    other.part.keep(at(3), stages[1].values.layer_states(), 0.0)
    for _ in stages[1].values.layers:
        other.hear()
    worker.part.keep(at(9), stages[0].values.layer_states(), 0.0)
    assert disk.begun.wait(SECONDS), "all that follows waits"
    worker.part.obey(protocol.CommitCheckpoint(checkpoint=at(2), parts=tuple(parts)))
    other.part.drop([at(3)])
    closing = threading.Thread(target=worker.part.close)
    closing.start()
    disk.may.set()
    closing.join()
    other.part.close()
    assert {one.name for one in folder.iterdir()} == {CheckpointId(n, f"a{n}").folder for n in (1, 2)}
    assert CheckpointStore(str(folder)).manifest(CheckpointId(2, "a2")).step == 2


def test_who_hears_that_a_checkpoint_is_given_up_writes_no_more_of_it_and_removes_what_is_there(
    tmp_path: Path, folder: Path
) -> None:
    stages = trained(tmp_path, 2, 1)
    worker = Worker(folder)
    worker.save(stages, at(1))
    worker.part.keep(at(2), stages[0].values.layer_states(), 0.0)
    for _ in stages[0].values.layers:
        worker.hear()
    worker.part.drop([at(2)])
    assert worker.find().checkpoint == at(1)
    worker.settle()
    assert {one.name for one in folder.iterdir()} == {CheckpointId(1, "a1").folder}
    worker.part.drop([at(1)])
    assert worker.find().checkpoint == at(1), "a complete one stays, whatever is said"
    worker.part.keep(at(1), {}, 0.0)
    worker.part.drop([at(1)])
    assert worker.find().checkpoint == at(1), "also if this worker has written of it last"
