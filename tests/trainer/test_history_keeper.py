"""The job's history across roots that die, freeze, and join late, and stores that do not answer."""

import threading
import time

from bamboo_core.control.protocol import HistoryEvent, HistoryEvents, HistoryKept, WorkerWarning
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import EventRecord, GapRecord, StepRecord
from bamboo_core.storage.errors import StoreUnavailable
from bamboo_trainer.frames.payloads import CheckpointMark, Commit
from history_keeper_kit import PATIENCE, first

pytest_plugins = ["history_keeper_fixtures"]


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


def test_a_root_that_joined_late_writes_nothing_before_it_has_heard_the_others(job):
    """Else what it knows counted as all that there is, and the others forgot what they were about to tell."""
    job.train(10)
    job.written()
    job.train(8)
    job.join("c")
    job.tell_newcomer("c", unwritten=False)
    job.train(2)
    job.lose("a")
    job.lead("c", 2, informed=False)
    time.sleep(0.2)  # long enough for a thread that does not wait
    assert job.raw() == first(10)
    job.inform_root()
    job.train_and_write(2)
    assert job.raw() == first(22)
    assert not [record for record in HistoryFiles(job.url).read_all() if isinstance(record, GapRecord)]


def test_what_all_who_knew_it_took_with_them_is_told_as_a_gap(job):
    job.train_and_write(2)
    job.train(3)
    job.join("c")
    job.train(4)
    job.lose("a", "b")
    job.lead("c", 2)
    job.train_and_write(3)
    records = merged(HistoryFiles(job.url).read_all())
    gaps = [(gap.first, gap.last) for gap in records if isinstance(gap, GapRecord)]
    assert gaps == [(3, 5)]
    assert job.raw() == [*first(2), *first(12, since=5)]
    job.join("d")
    job.tell_newcomer("d")
    job.lose("c")
    job.lead("d", 3)
    job.train_and_write(1)
    assert [r for r in merged(HistoryFiles(job.url).read_all()) if isinstance(r, GapRecord)] == [
        r for r in records if isinstance(r, GapRecord)
    ], "the gap is told once"


def test_going_back_begins_another_attempt(job):
    job.train_and_write(6)
    job.go_back(4, 5)
    job.lead("b", 5)
    job.train_and_write(2)
    assert job.raw() == [*first(6), (2, 5), (2, 6)]
    job.go_back(6, 7)
    job.lead("b", 7, moved=True)
    job.train_and_write(1)
    assert job.raw()[-1] == (2, 7), "layers that were split anew are no new attempt"


def events(*numbers: int) -> HistoryEvents:
    told = tuple(HistoryEvent(number=n, time=float(n), reason="R", message=f"m{n}") for n in numbers)
    return HistoryEvents(source="s", events=told)


def test_events_are_written_once_and_acknowledged_when_they_are(job):
    job.keepers["a"].happened(events(1, 2))
    job.train_and_write(1)
    job.written()
    assert HistoryKept(source="s", number=2) in job.told
    job.replace_root("b")
    job.train_and_write(1)
    job.keepers["b"].happened(events(1, 2, 3))  # the acknowledgement was lost
    job.written()
    found = [r.number for r in HistoryFiles(job.url).read_all() if isinstance(r, EventRecord)]
    assert sorted(found) == [1, 2, 3]


def test_a_checkpoint_has_its_steps_written_soon(job):
    job.train_and_write(1)
    mark = CheckpointMark(number=1, id="a", writers=())
    commit = Commit(
        norm=1.0,
        loss=1.0,
        microbatches=2,
        generation=0,
        epoch=1,
        checkpoint=mark,
        history=job.keepers["a"].mark(1, 0.5, 0.1),
    )
    job.keepers["a"].committed(1, 1, commit)
    files = HistoryFiles(job.url)
    wait = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if len(files.read_all()) == 2:
            break
        wait.wait(0.01)
    assert job.raw() == first(2)


def test_a_store_that_is_away_costs_one_warning_and_no_step(job, monkeypatch):
    away = [True]
    real = HistoryFiles.write

    def write(self, *arguments):
        if away[0]:
            raise StoreUnavailable("cannot write: it is away")
        real(self, *arguments)

    monkeypatch.setattr(HistoryFiles, "write", write)
    monkeypatch.setattr("bamboo_trainer.worker.history.history_keeper.HELD_SECONDS", 0.0)
    for _ in range(3):
        job.train_and_write(2)  # it waits no longer than it may
    away[0] = False
    job.train(1)
    monkeypatch.setattr("bamboo_trainer.worker.history.history_keeper.HELD_SECONDS", PATIENCE)
    job.written()
    assert job.raw() == first(7)
    assert [m for m in job.told if isinstance(m, WorkerWarning)] == [
        WorkerWarning(reason="HistoryNotWritten", message="cannot write: it is away")
    ]


def test_who_waits_for_what_is_known_does_not_wait_for_what_comes_while_it_is_written(job, monkeypatch):
    """Else a checkpoint, or the end of the job, would wait for one turn after the other."""
    monkeypatch.setattr("bamboo_trainer.worker.history.history_keeper.HELD_SECONDS", 4 * PATIENCE)
    written = HistoryFiles.write

    def write(files, file, records):
        written(files, file, records)
        job.train(1)
        job.keepers["a"].happened(events(job.step))

    monkeypatch.setattr(HistoryFiles, "write", write)
    job.train_and_write(2)
    for least in (2, 3):
        found = job.raw()
        assert found == first(max(least, len(found))), "all until some step: what comes is written turn by turn"
        job.written()


def test_a_file_is_followed_by_another_when_it_is_full(job, monkeypatch):
    monkeypatch.setattr("bamboo_trainer.worker.history.history_keeper.MOST_RECORDS", 4)
    job.train_and_write(10)
    job.train_and_write(3)
    assert job.raw() == first(13)
    assert len(HistoryFiles(job.url).all()) == 4
