"""What a worker knows of the history, and how much of it is written."""

from pathlib import Path

from bamboo.history.records import GapRecord
from bamboo_trainer.transport.payloads import Commit
from bamboo_trainer.worker.history import history_buffer
from bamboo_trainer.worker.history.history_buffer import HistoryBuffer, Rates
from history_keeper_kit import Job, first

pytest_plugins = ["history_keeper_fixtures"]


def test_another_run_of_the_job_is_another_attempt(job):
    job.train_and_write(3)
    job.close()
    other = Job(Path(job.url))
    other.step = 2
    other.join("w")
    other.lead("w", 1)
    other.train(2)
    other.written()
    other.close()
    assert job.raw() == [*first(3), (2, 2), (2, 3)]


def test_what_is_kept_for_a_store_that_stays_away_is_bounded_and_the_gap_is_told(monkeypatch):
    monkeypatch.setattr(history_buffer, "MOST_KEPT", 10)
    buffer = HistoryBuffer(Rates(batch=1))
    for step in range(25):
        job_mark = history_buffer.HistoryMark(attempt=1, written=0, at=float(step))
        commit = Commit(norm=1.0, loss=1.0, microbatches=1, generation=0, epoch=1, history=job_mark)
        buffer.committed(1, step, commit)
    gap, *steps = buffer.pending(1, informed=True)
    assert isinstance(gap, GapRecord)
    assert (gap.attempt, gap.first, gap.last) == (1, 0, 14)
    assert [record.step for record in steps] == list(range(15, 25))
    buffer.written(1, [gap, *steps])
    assert buffer.pending(1, informed=True) == ()
