"""What a worker knows of the history, and how much of it is written."""

from collections.abc import Iterable
from pathlib import Path

from bamboo_core.history.records import GapRecord, Record
from bamboo_trainer.frames.payloads import Commit
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
    assert job.raw() == [*first(3), (2, 3), (2, 4)]


def test_what_is_kept_for_a_store_that_stays_away_is_bounded_and_the_gap_is_told(monkeypatch):
    monkeypatch.setattr(history_buffer, "MOST_KEPT", 10)
    buffer = HistoryBuffer(Rates(batch=1))
    for step in range(25):
        job_mark = history_buffer.HistoryMark(attempt=1, written=0, at=float(step))
        commit = Commit(norm=1.0, loss=1.0, microbatches=1, generation=0, epoch=1, history=job_mark)
        buffer.committed(1, step, commit)
    gap, *steps = buffer.pending(1, informed=True)
    assert isinstance(gap, GapRecord)
    assert (gap.attempt, gap.first, gap.last) == (1, 1, 15)
    assert [record.step for record in steps] == list(range(16, 26))
    buffer.written(1, [gap, *steps])
    assert buffer.pending(1, informed=True) == ()


def commit(at: float, *, trained: bool = True, written: int = 0, **evaluation: float) -> Commit:
    mark = history_buffer.HistoryMark(attempt=1, written=written, at=at)
    return Commit(
        norm=1.0, loss=1.0, microbatches=int(trained), generation=0, epoch=1, history=mark, evaluation=evaluation
    )


def shown(records: Iterable[Record]) -> list[tuple[str, int]]:
    return [(type(record).__name__[0:2], record.step) for record in records if not isinstance(record, GapRecord)]


def test_an_evaluation_is_of_the_step_before_the_commit_that_brings_it_and_none_is_a_step_without_a_loss():
    buffer = HistoryBuffer(Rates(batch=1))
    buffer.committed(1, 0, commit(1.0))
    buffer.committed(1, 1, commit(2.0, x=0.5))
    buffer.committed(1, 2, commit(3.0, trained=False, x=0.25))
    assert shown(buffer.pending(1, informed=True)) == [("St", 1), ("Ev", 1), ("St", 2), ("Ev", 2)]
    (told,) = buffer.unwritten()
    other = HistoryBuffer(Rates(batch=1))
    other.heard(told)
    other.heard(told)
    pending = other.pending(1, informed=True)
    assert pending == buffer.pending(1, informed=True)
    buffer.written(1, pending[:1])
    assert shown(buffer.pending(1, informed=True)) == [("Ev", 1), ("St", 2), ("Ev", 2)]
    other.written(1, pending)
    other.heard(told)
    assert other.pending(1, informed=True) == ()
    assert other.written_up_to(1) == 2
    third = HistoryBuffer(Rates(batch=1))
    third.heard(told)
    third.committed(1, 2, commit(3.0, written=1))
    assert shown(third.pending(1, informed=True))[:2] == [("Ev", 1), ("St", 2)], "the evaluation came with step 2"
    third.committed(1, 3, commit(4.0, written=2))
    assert shown(third.pending(1, informed=True))[0] == ("Ev", 2)
