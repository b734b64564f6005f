"""Which steps are committed, and what the root has heard of the step in progress."""

import math

from bamboo_core.planning.plan import Cell, Layout
from bamboo_trainer.commit.commit_log import KEPT_STEPS, CommitLog
from bamboo_trainer.frames.payloads import Commit, Ready

LAYOUT = Layout(generation=3, split=((0,), (1,)))


def ready(pipeline: int, stage: int, loss: float = 1.0) -> Ready:
    losses = {pipeline: loss} if stage == 1 else {}
    return Ready(cell=Cell(pipeline, stage), squared_norm=[4.0], losses=losses)


def decided(log: CommitLog) -> Commit | None:
    return log.decide(5, 2, LAYOUT, generation=3, epoch=7)


def test_a_step_is_decided_once_every_cell_has_reported_and_in_any_order() -> None:
    one, other = CommitLog(5), CommitLog(5)
    reports = [ready(d, s, loss=1.0 + d) for d in range(2) for s in range(2)]
    for report in reports[:-1]:
        one.ready(5, report, "a")
    assert decided(one) is None
    one.ready(5, reports[-1], "a")
    for report in reversed(reports):
        other.ready(5, report, "b")
    commit = decided(one)
    assert commit is not None
    assert commit == decided(other)
    assert (commit.norm, commit.loss, commit.generation, commit.epoch) == (math.sqrt(8.0), 1.5, 3, 7)


def test_the_first_report_of_a_cell_counts() -> None:
    log = CommitLog(5)
    for report in [ready(d, s) for d in range(2) for s in range(2)]:
        log.ready(5, report, "a")
    log.ready(5, ready(1, 1, loss=99.0), "a")
    commit = decided(log)
    assert commit is not None
    assert commit.loss == 1.0


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


def test_a_generation_that_a_commit_told_is_not_told_otherwise() -> None:
    log = CommitLog(0)
    log.learn_generation(2, 8)
    log.learn_generation(2, 9)
    assert (log.generation(2), log.generation(3)) == (8, None)


def test_the_last_steps_and_what_a_replica_needs_are_kept() -> None:
    log = CommitLog(0)
    for step in range(10):
        log.record(step, Commit(norm=0.0, loss=0.0, microbatches=1, generation=0, epoch=1))
    assert [step for step, _ in log.latest()] == [8, 9]
    log.forget(oldest_needed=4)
    assert sorted(log.commits) == list(range(4, 10))
    log.forget(oldest_needed=100)
    assert sorted(log.commits) == list(range(9 - KEPT_STEPS, 10))
