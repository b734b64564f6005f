"""Several readers: the same batches in the same order, whatever becomes of the processes that read them."""

import os
from pathlib import Path

import pytest
import torch

from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.task_errors import TaskError
from reader_kit import Sleeping, Told, reading, until
from stage_kit import CONFIG


@pytest.mark.parametrize("processes", [True, False])
def test_batches_come_from_several_readers_and_are_those_that_were_asked_for(tmp_path, processes):
    data = Told(tmp_path)
    with reading(data, readers=3, ahead=6, processes=processes) as reader:
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
        assert (os.getpid() in {pid for pid, _ in makers}) is not processes


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
