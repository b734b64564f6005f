"""What a run tells: the live picture, plain lines, the summary and the trace."""

import re
from dataclasses import replace

from bamboo.terminal.view import PlainView, progress
from bamboo_core.coordinator.events import Emit
from run_view_kit import STATUS


def test_plain_lines_are_rare_and_events_are_not() -> None:
    lines: list[str] = []
    now = 0.0
    view = PlainView(lines.append, clock=lambda: now, stamp=lambda: "12:00:00")
    for step in range(1, 50):
        now = step / 10
        view.status(replace(STATUS, step=step))
    view.emit(Emit("Reason", "a sentence", True))
    assert len(lines) == 4
    assert lines[-1] == "12:00:00 ! Reason: a sentence"
    assert re.match(r"12:00:00 step \d+/10, loss", lines[0])
    view.emit(Emit("TaskFailed", "how it ended is for the summary to say", True, final=True))
    assert len(lines) == 4


def test_a_job_that_an_evaluation_ends_says_so_beside_the_steps_that_were_wanted() -> None:
    assert progress(replace(STATUS, step=9, stopped_early="no better")).startswith("step 9/10, stopped early, ")
    assert "stopped" not in progress(STATUS)


def test_lines_have_the_time_of_day() -> None:
    lines: list[str] = []
    PlainView(lines.append).emit(Emit("Reason", "a sentence"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Reason: a sentence", lines[0])
