"""The job's history across roots that die or join late, returns to checkpoints, and stores that do not answer."""

import json
import threading
import time
from pathlib import Path

import pytest

from bamboo_core.control.protocol import HistoryEvent, HistoryEvents, HistoryKept, WorkerWarning
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import EvaluationRecord, EventRecord, StepRecord
from bamboo_core.storage.bounded import StoreUnavailable
from bamboo_trainer.worker.history_keeper import HistoryKeeper, Rates
from history_keeper_kit import CHECKPOINT, Job, first, plan


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    job.join("a", "b")
    job.lead("a", 1)
    yield job
    job.close()


def test_a_step_has_what_was_measured(job):
    job.train_and_write(3)
    record = merged(HistoryFiles(job.url).read_all())[2]
    assert record == StepRecord(
        attempt=1,
        step=3,
        time=record.time,
        loss=1 / 3,
        gradient_norm=1.0,
        learning_rate=0.1,
        seconds=0.5,
        samples=12,
        samples_per_second=8.0,
        tokens=96,
        tokens_per_second=64.0,
    )


def called(job: Job) -> list[tuple[int, int]]:
    """Return the attempt and step of each call in the callback's saved state; the call at the end has attempt 0."""
    state = json.loads((Path(job.url) / "callback-steps.json").read_bytes())["state"]
    return [(one[0], one[1]) if isinstance(one, list) else (0, one) for one in state]


def test_a_root_that_joined_late_writes_nothing_before_it_has_heard_the_others(job):
    """A root that joined late waits for the others' commits before it writes: a write makes them forget these."""
    job.train_and_write(10)
    job.train(8)
    job.join("c")
    job.tell_newcomer("c", unwritten=False)
    job.train(2)
    job.lose("a")
    job.lead("c", 2, informed=False)
    job.keeper("c").when_written(lambda: None)
    job.workers["c"].turn()
    assert job.raw() == first(10)
    job.inform_root()
    job.train_and_write(2)
    assert sorted(set(job.raw())) == first(22)


def test_a_whole_restart_from_a_checkpoint_lacks_no_step_and_the_callback_goes_on(job):
    job.train(4, checkpoint=CHECKPOINT)
    job.train_and_write(3)
    job.close()
    other = Job(Path(job.url))
    other.go_back(4, 1)
    other.join("w", "x")
    other.lead("w", 1)
    other.train_and_write(2)
    other.replace_root("x")
    other.train(3)
    other.written(complete=True)
    assert sorted(set(job.raw())) == [*first(7), *first(9, 2, since=4)]
    assert called(job) == [*first(4), *first(9, 2, since=4), (0, 9)]


@pytest.mark.parametrize("root", ["a", "b"])
def test_going_back_begins_another_attempt(job, root):
    """A return to a checkpoint begins another attempt, whatever the next root knows of the history's last attempt."""
    job.train_and_write(6)
    job.go_back(4, 5)
    job.lead(root, 5)
    job.train_and_write(2)
    assert sorted(set(job.raw())) == [*first(6), (2, 5), (2, 6)]
    job.go_back(6, 7)
    job.lead(root, 7, moved=True)
    job.train_and_write(1)
    assert job.raw()[-1] == (2, 7), "layers that were split anew are no new attempt"


def test_a_job_that_goes_back_while_its_history_is_written_lacks_no_step(job, monkeypatch):
    written = HistoryFiles.write

    def write(files, file, records):
        monkeypatch.setattr(HistoryFiles, "write", written)
        job.go_back(2, 5)
        job.lead("a", 5)
        job.train(3)
        files.write(file, records)

    monkeypatch.setattr(HistoryFiles, "write", write)
    job.train_and_write(6)
    job.written()
    assert sorted(set(job.raw())) == [*first(6), *first(5, 2, since=2)]


def events(*numbers: int) -> HistoryEvents:
    sent = tuple(HistoryEvent(number=n, time=float(n), reason="R", message=f"m{n}") for n in numbers)
    return HistoryEvents(source="s", events=sent)


def test_events_are_written_and_acknowledged_when_they_are(job):
    job.keeper("a").happened(events(1, 2))
    job.train_and_write(1)
    assert HistoryKept(source="s", number=2) in job.told
    job.replace_root("b")
    job.train_and_write(1)
    job.keeper("b").happened(events(1, 2, 3))  # the acknowledgement was lost
    job.written()
    records = merged(HistoryFiles(job.url).read_all())
    assert [record.number for record in records if isinstance(record, EventRecord)] == [1, 2, 3]


def test_an_evaluation_is_of_the_step_before_the_commit_that_brings_it(job):
    job.train(1)
    job.train(1, evaluation={"x": 0.5})
    job.train(1, evaluation={"x": 0.25}, microbatches=0)
    job.written()
    found = [(type(one), one.step) for one in HistoryFiles(job.url).read_all()]
    assert found == [(StepRecord, 1), (EvaluationRecord, 1), (StepRecord, 2), (EvaluationRecord, 2)]


def test_a_checkpoint_has_its_steps_written_soon(job):
    job.train_and_write(1)
    assert not job.workers["a"].turns[-1].due
    job.train(1, checkpoint=CHECKPOINT)
    assert job.workers["a"].turns[-1].due


def test_a_store_that_is_away_costs_one_warning_and_no_step(job, monkeypatch):
    away = [True]
    real = HistoryFiles.write

    def write(self, *arguments):
        if away[0]:
            raise StoreUnavailable("cannot write: it is away")
        real(self, *arguments)

    monkeypatch.setattr(HistoryFiles, "write", write)
    monkeypatch.setattr("bamboo_trainer.worker.history_keeper.HELD_SECONDS", 0.0)
    for _ in range(3):
        job.train_and_write(2)  # it waits no longer than it may
    away[0] = False
    job.train_and_write(1)
    assert job.raw() == first(7)
    assert [m for m in job.told if isinstance(m, WorkerWarning)] == [
        WorkerWarning(reason="HistoryNotWritten", message="cannot write: it is away")
    ]


def test_what_is_kept_for_a_store_that_stays_away_is_bounded(job, monkeypatch):
    monkeypatch.setattr("bamboo_trainer.worker.history_keeper.MOST_KEPT", 10)
    job.train(25)
    assert [step for step, _ in job.keeper("b").unwritten()[0]] == list(range(15, 25))


def test_who_waits_for_what_is_known_does_not_wait_for_what_comes_while_it_is_written(job, monkeypatch):
    """A wait for the history ignores later records; otherwise, a checkpoint and the job's end could wait for ever."""
    written = HistoryFiles.write

    def write(files, file, records):
        written(files, file, records)
        job.train(1)
        job.keeper("a").happened(events(job.step))

    monkeypatch.setattr(HistoryFiles, "write", write)
    job.train_and_write(2)
    job.written()
    assert job.raw() == first(len(job.raw()))


def test_a_file_is_followed_by_another_when_it_is_full(job, monkeypatch):
    monkeypatch.setattr("bamboo_trainer.worker.history_keeper.MOST_RECORDS", 4)
    job.train_and_write(10)
    job.train_and_write(3)
    assert job.raw() == first(13)
    assert len(HistoryFiles(job.url).all()) == 4


def test_a_worker_ends_although_the_store_hangs(job, monkeypatch):
    """A keeper with its real threads closes in time although the store hangs."""
    go_on = threading.Event()
    monkeypatch.setattr(HistoryFiles, "all", lambda self: go_on.wait(120.0) and [])
    files = HistoryFiles(job.url)
    keeper = HistoryKeeper(files, Rates(batch=1), job.told.append, [])
    keeper.take_role(plan(1), True)
    keeper.informed()
    keeper.when_written(lambda: None)
    since = time.monotonic()
    keeper.close(0.1, 0.1)
    assert time.monotonic() < since + 60.0
    go_on.set()
