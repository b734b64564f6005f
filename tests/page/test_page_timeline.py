"""The timeline of a job's page: its curves, marks and events, and their bounds."""

import pytest

from bamboo_core.coordinator.events import Emit
from bamboo_core.page.timeline import MOST_EVENTS, MOST_MARKS, Curves, JobTimeline, StepFigures, steady_clock
from page_kit import TAKEOVER, Time

NOTHING = StepFigures(None)


@pytest.mark.parametrize(("steps", "kept"), [(0, 0), (1, 1), (7, 7), (8, 4), (9, 5), (10, 5), (16, 4), (100_000, 7)])
def test_curves_are_bounded_and_whole(steps: int, kept: int) -> None:
    curves = Curves(most=8)
    for step in range(1, steps + 1):
        curves.add(step, 10.0 * step, StepFigures(float(step), 2.0 * step, 3.0 * step))
    points = curves.points()
    assert len(points) == kept
    assert [p.step for p in points] == sorted({p.step for p in points})
    if points:
        assert (points[-1].step, points[-1].at) == (steps, 10.0 * steps)
        assert points[0].step <= max(1, steps / 3), "the beginning is lost"
    weights = [b.step - a for a, b in zip([0, *(p.step for p in points)], points, strict=False)]
    for times, name in ((1, "loss"), (2, "gradient_norm")):
        total = sum(w * getattr(p.figures, name) for w, p in zip(weights, points, strict=True))
        assert total == pytest.approx(times * steps * (steps + 1) / 2), "a point is not the mean of its steps"
    assert all(p.figures.learning_rate == 3 * p.step for p in points), "a rate is that of its point's last step"


def test_a_loss_that_is_not_known_spoils_no_mean() -> None:
    curves = Curves(most=2)
    for step, loss in enumerate([1.0, None, None, None], start=1):
        curves.add(step, step, StepFigures(loss))
    assert [p.figures for p in curves.points()] == [StepFigures(1.0)]


def test_the_record_takes_each_step_takeover_and_word_once() -> None:
    clock = Time()
    record = JobTimeline(clock)
    record.follow(0, NOTHING, ())
    for now, step in ((1001, 1), (1002, 1), (1003, 2)):
        clock.now = now
        record.follow(step, StepFigures(5.0 - step), (TAKEOVER,) * (step - 1))
        record.follow(step, StepFigures(5.0 - step), (TAKEOVER,) * (step - 1))
    record.add_event(Emit("WorkerLost", "w1 is lost: killed", True))
    record.add_event(Emit("NoticeReceived", "w2 will be taken away", True))
    record.add_event(Emit("WorkerJoined", "w3 joined"))
    record.add_event(Emit("Restored", "the job goes on from the checkpoint of step 1", True))
    found = [(p.step, p.at, p.figures.loss) for p in record.curves.points()]
    assert found == [(1, 1001, 4.0), (2, 1003, 3.0)]
    assert [mark.kind.value for mark in record.marks] == ["takeover", "loss", "notice", "restore"]
    assert [emit.reason for _, emit in record.events] == ["WorkerLost", "NoticeReceived", "WorkerJoined", "Restored"]


@pytest.mark.parametrize(
    ("reported", "points"),
    [
        ((300, 301), [301]),  # a restarted coordinator knows step 300 to be committed, but not when
        ((0, 1, 2, 3, 1, 2, 3, 4), [1, 2, 3, 2, 3, 4]),  # the job goes back to step 1 and repeats two steps
    ],
)
def test_only_a_step_that_follows_a_known_one_is_a_point(reported: tuple[int, ...], points: list[int]) -> None:
    record = JobTimeline(Time())
    for step in reported:
        record.follow(step, StepFigures(5.0 - step), ())
    assert [p.step for p in record.curves.points()] == points


def test_the_record_is_bounded() -> None:
    record = JobTimeline(Time())
    for n in range(1000):
        record.add_event(Emit("WorkerLost", str(n), True))
    assert (len(record.events), len(record.marks)) == (MOST_EVENTS, MOST_MARKS)
    assert record.marks[-1].message == "999"


def test_the_clock_is_the_wall_s_and_never_falls() -> None:
    clock = steady_clock()
    readings = [clock() for _ in range(100)]
    assert readings == sorted(readings)
    assert readings[0] > 1_700_000_000
