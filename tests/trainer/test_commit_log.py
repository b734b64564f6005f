"""Which steps are committed, and what the root has heard of the step in progress."""

from bamboo_core.planning.plan import Cell, Layout
from bamboo_trainer.commit.commit_log import KEPT_STEPS, CommitLog
from bamboo_trainer.frames.payloads import Commit, Ready

LAYOUT = Layout(generation=3, split=((0,), (1,)))


def ready(pipeline: int, stage: int, loss: float = 1.0) -> Ready:
    losses = {pipeline: loss} if stage == 1 else {}
    return Ready(cell=Cell(pipeline, stage), squared_norm=[4.0], losses=losses)


def decided(log: CommitLog) -> Commit | None:
    return log.decide(5, 2, LAYOUT, generation=3, epoch=7)


def test_what_is_recorded_needs_no_reports_any_more() -> None:
    log = CommitLog(5)
    assert log.newest == 4
    for report in [ready(d, s) for d in range(2) for s in range(2)]:
        log.ready(5, report, "a")
    commit = decided(log)
    assert commit is not None
    log.record(5, commit)
    assert (log.newest, log.generation(6), decided(log)) == (5, 3, None)
    log.ready(5, ready(0, 0), "a")
    assert decided(log) is None


def test_the_last_steps_and_what_a_replica_needs_are_kept() -> None:
    log = CommitLog(0)
    for step in range(10):
        log.record(step, Commit(norm=0.0, loss=0.0, microbatches=1, generation=0, epoch=1))
    assert [step for step, _ in log.latest()] == [8, 9]
    log.forget(oldest_needed=4)
    assert sorted(log.commits) == list(range(4, 10))
    log.forget(oldest_needed=100)
    assert sorted(log.commits) == list(range(9 - KEPT_STEPS, 10))
