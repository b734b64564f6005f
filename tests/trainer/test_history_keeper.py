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


def test_a_new_root_goes_on_where_the_one_before_it_ended(job):
    job.train_and_write(5)
    job.train(5)  # these are told, and not written
    job.replace_root("b")
    job.train_and_write(5)
    assert job.raw() == first(15)


def test_what_was_written_and_never_told_is_not_written_again(job):
    job.train_and_write(5)
    job.train_and_write(5)  # no commit has told of these five
    job.lose("a")
    assert len(job.keepers["b"].unwritten()) > 0
    job.lead("b", 2)
    job.train_and_write(1)
    assert job.raw() == first(11)


def test_a_root_that_joined_late_gets_from_the_others_what_it_has_never_heard(job):
    job.train_and_write(1)
    job.train(6)
    job.join("c")
    job.train(1)
    job.lose("a")
    job.lead("c", 2)
    job.train_and_write(2)
    assert job.raw() == first(10)


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


def test_who_joins_is_told_what_is_not_written_yet(job):
    """The only other worker that heard the first steps is lost, and then the root is."""
    job.lose("b")
    job.train(6)
    job.join("c")
    job.tell_newcomer("c")
    job.train(6)
    job.lose("a")
    job.lead("c", 2)
    job.train_and_write(1)
    assert job.raw() == first(13)


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


def test_a_new_root_reads_as_many_files_as_no_commit_has_told_of(job, monkeypatch):
    monkeypatch.setattr("bamboo_trainer.worker.history.history_keeper.MOST_RECORDS", 2)
    job.train_and_write(1)
    job.train_and_write(12)  # in many files, and told by no commit
    job.lose("a")
    job.lead("b", 2)
    job.train_and_write(1)
    assert job.raw() == first(14)


def test_a_root_that_dies_before_it_has_written_anything_leaves_no_trace_of_an_attempt(job):
    job.train(4)
    job.replace_root("b")
    job.train_and_write(4)
    job.train_and_write(1)
    assert job.raw() == first(9)


def test_a_frozen_root_that_wakes_spoils_nothing(job):
    job.train_and_write(3)
    job.train(3)
    frozen = job.keepers.pop("a")
    job.lead("b", 2)
    job.train_and_write(3)
    frozen.close(PATIENCE)  # writes what it had
    records = merged(HistoryFiles(job.url).read_all())
    assert [(r.attempt, r.step) for r in records] == first(9)


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


def test_what_was_done_before_going_back_is_written_by_who_comes_after(job):
    """Nobody has written anything, nor said which attempt it is."""
    job.train(6)
    job.lose("a")
    job.go_back(4, 5)
    job.lead("b", 5)
    job.train_and_write(2)
    assert sorted(job.raw()) == [*first(6), (2, 5), (2, 6)]


def test_who_joins_when_the_job_goes_back_is_told_which_attempt_the_rest_belongs_to(job):
    job.train_and_write(3)
    job.train(4)
    job.lose("a")
    left = job.keepers.pop("b")
    job.go_back(5, 5)
    job.join("c")
    job.lead("c", 5)
    job.train_and_write(1)
    for records in left.unwritten():
        job.keepers["c"].heard(records)  # late
    job.train_and_write(1)
    assert sorted(job.raw()) == [*first(7), (2, 6), (2, 7)]


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
