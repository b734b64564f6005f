"""The picture of a job on a terminal: live view, status page, and list of jobs."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from bamboo.remote.parsing import events_of, workers_of
from bamboo.terminal import picture
from bamboo.terminal.picture import sparkline
from bamboo.terminal.snapshot import JobSnapshot
from bamboo_core.coordinator.events import Emit, WorkerState
from bamboo_core.view.job_view import view_of
from remote_kit import NOW as THEN
from remote_kit import Json, condition, ended, event, job, node, plan, pod, stamp
from run_view_kit import STATUS, drawn


def test_the_live_picture_shows_progress_grid_and_events() -> None:
    text = drawn(STATUS, Emit("TakenOver", "w0 [runs] stage 1", True))
    for part in (
        "job  Degraded  on this machine, epoch 2, 90s old",
        "Training continues; 1 of 2 stages held by one worker only: pipeline 0 stage 1;",
        "step 3/10, loss 1.5000, 40.0 samples/s, ETA 1s",
        "accuracy 0.1235  balance 2e-07  nothing -",
        "1 of 1 pipeline, 3 of 3 workers ready, 1 preemption, 1 takeover",
        "stage 1",
        "w0 slow",
        "w2 unprotected",
        "other workers: w3 standby",
        "90s TakenOver: w0 [runs] stage 1",
    ):
        assert part in text
    early = drawn(replace(STATUS, grid=(), losses=(), loss=None, workers=(), eta_seconds=None, preemptions=0))
    assert "step 3/10, 40.0" in early
    assert ("ETA" in early, "stage 1" in early, "old" in early) == (False, False, True)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal_nor_cut_off(width: int) -> None:
    """The view wraps a row of many stages, and continues long sentences on the next line."""
    grid = tuple(tuple((f"w{16 * d + s}", bool(s % 3)) for s in range(16)) for d in range(2))
    workers = tuple((f"w{n}", WorkerState.TRAINING) for n in range(32))
    said = "w1 runs stage 2 of pipeline 0 in place of w3: pause 1374 ms, repeated 18 forwards, 15 backwards"
    text = drawn(
        replace(STATUS, grid=grid, workers=workers),
        Emit("A", said),
        Emit("B", f"{said}; {said}"),
        width=width,
        page="http://127.0.0.1:1/",
    )
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"90s A: {said} 89s B: {said}; {said}" in words
    assert all(f" w{n}" in text for n in range(32))
    assert [f"stage {s}" in text for s in range(16)] == [True] * 16


def test_the_sparkline_has_a_bar_for_each_share() -> None:
    assert sparkline([3.0, 2.0, 1.0], 9) == "█▅▁"
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert sparkline([1.0, 1.0], 9) == "▁▁"
    assert sparkline([float("nan")], 9) == ""


def test_a_loss_that_is_far_from_all_near_it_leaves_the_curve_its_scale() -> None:
    falling = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert sparkline(falling, 9) == "█▇▆▅▄▃▂▁"
    falling[3] = 1e6
    assert sparkline(falling, 9) == "█▇▆█▄▃▂▁"


# On a cluster

DEGRADED = condition("Degraded", True, "Unprotected", "stage 2 of pipeline 0 has no second copy")


def snapshot(body: Json | None = None, pods: list[Json] | None = None, **more: Any) -> JobSnapshot:
    found = view_of(body or job())
    pods = [pod(n) for n in range(5)] if pods is None else pods
    nodes = {f"node-{n}": node(f"node-{n}") for n in range(3)}
    return JobSnapshot(job=found, workers=workers_of(found, pods, nodes), **more)


def on_a_terminal(shown: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_the_status_page_fits_80_columns_and_says_everything() -> None:
    row = ["story-w0", "story-w1", "story-w1", "story-w3"]
    body = job(
        state="Degraded",
        plan=plan(row),
        preemptions=1,
        takeovers=2,
        restarts=1,
        conditions=[
            condition("Accepted", True),
            condition("WorkersReady", False, "Unschedulable", "2 find no node"),
            condition("Running", True),
            DEGRADED,
            condition("Failed", False, "NotFailed"),
        ],
    )
    told = tuple(events_of(view_of(body), [event("story", "TakenOver", "long " * 30, 9, type="Warning")], [], []))
    text = on_a_terminal(picture.status(snapshot(body, events=told, missing=("events: permission denied",)), THEN, 80))
    for part in (
        "story  Degraded  team, epoch 2, 10m old",
        "step 100/1000, loss 2.5000, 130.1 samples/s, ETA 2:05",
        "1 of 1 pipeline, 5 of 5 workers ready, 1 preemption, 2 takeovers",
        "cost 0.1234 so far, 4.50 an hour, about 0.2797 at the end",
        "2 find no node",
        "stage 2 of pipeline 0 has no second copy",
        "not shown: events: permission denied",
        "0 │ w0      │ w1*     │ w1*     │ w3",
        "* runs more than one stage until a replacement is ready",
        "w1      training  0/1 0/2  node-1  zone-1  Spot       5m",
        "w4      standby   -        node-1",
        "WorkersReady  False  60s  Unschedulable: 2 find no node",
        "Failed        False  60s  NotFailed",
        "  9s TakenOver: long long",
    ):
        assert part in text, text


@pytest.mark.parametrize("height", [10, 15, 20, 24, 40, 60])
@pytest.mark.parametrize("count", [0, 5, 40])
def test_the_live_picture_fits_the_terminal_as_far_as_it_can(height: int, count: int) -> None:
    told = tuple(events_of(view_of(job()), [event("story", f"E{n}", "m " * 60, n) for n in range(20)], [], []))
    seen = snapshot(pods=[pod(n) for n in range(count)], events=told)
    lines = on_a_terminal(picture.live(seen, THEN, 80, height, "http://127.0.0.1:1/")).splitlines()
    head = 8  # the job and its grid, which are always shown
    assert len(lines) <= max(height, head + 1)
    assert lines[-1] == "page: http://127.0.0.1:1/"
    if height >= 24:
        assert any("E0" in line for line in lines), "the newest event is missing"
        assert any("more workers" in line for line in lines) == (count == 40 and height < 50)


def test_what_needs_attention_comes_first_where_there_is_no_room_for_all() -> None:
    pods = [pod(n) for n in range(9)] + [pod(9, **ended(1))]
    pods[8]["metadata"]["deletionTimestamp"] = stamp(-9)
    listed, used = picture.workers_within(snapshot(pods=pods), THEN, 80, 5)
    text = "\n".join(on_a_terminal(part) for part in listed)
    assert used == len(text.splitlines()) == 5
    assert "leaving" in text
    assert "failed" not in text
    assert "and 7 more workers" in text


def test_a_list_of_jobs_has_a_line_for_each() -> None:
    jobs = [view_of(job()), view_of(job("late", state="Complete", conditions=[condition("Complete", True)]))]
    assert on_a_terminal(picture.jobs(jobs, THEN)).splitlines() == [
        "NAME   STATE         STEP  PIPELINES  WORKERS  PROTECTED  PREEMPTIONS  AGE",
        "story  Running   100/1000        1/1      5/5  -                    0  10m",
        "late   Complete  100/1000        1/1      5/5  -                    0  10m",
    ]
    spaced = on_a_terminal(picture.jobs(jobs, THEN, namespaces=True), width=200).splitlines()
    assert spaced[1].split() == ["team", "story", "Running", "100/1000", "1/1", "5/5", "-", "0", "10m"]


def test_a_job_that_is_over_says_how_and_complains_of_nothing_else() -> None:
    over = [
        condition("WorkersReady", False, "JobOver", "the job is over"),
        condition("Running", False, "JobOver", "the job is over"),
        condition("Failed", True, "StageLost", "stage 1 is lost"),
    ]
    text = on_a_terminal(picture.status(snapshot(job(state="Failed", conditions=over), pods=[]), THEN, 80))
    assert "stage 1 is lost" in text
    assert "the job is over" not in text
    assert "ETA" not in text
