"""The terminal view of a local run as plain lines."""

import re
from dataclasses import replace

from bamboo.terminal.live_view import LineScreen, LiveView
from bamboo_core.coordinator.events import Emit
from operator_kit import job
from run_view_kit import STATUS


def test_lines_of_progress_are_rare_and_those_of_events_are_not() -> None:
    lines: list[str] = []
    now = 0.0
    view = LiveView(job("job"), LineScreen(lines.append, lambda: now))
    view.start(lambda request: None)
    for step in range(1, 10):
        for _ in range(5):
            now += 0.1
            view.status(replace(STATUS, step=step))
    for number in range(2):
        view.emit(Emit("Reason", f"sentence {number}", True))
    view.emit(Emit("TaskFailed", "how it ended is for the summary to say", True, final=True))
    assert lines.pop(0) == "job: starting workers"
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", "", line)[:25] for line in lines] == [
        *(f"Degraded, step {step}/10, loss"[:25] for step in (1, 2, 6)),
        *(f"Reason: sentence {number}" for number in range(2)),
    ]


def test_a_job_that_an_evaluation_ends_says_so_beside_the_steps_that_were_wanted() -> None:
    lines: list[str] = []
    LiveView(job("job"), LineScreen(lines.append)).status(replace(STATUS, step=9, stopped_early="no better"))
    assert ", step 9/10, stopped early, " in lines[0]
