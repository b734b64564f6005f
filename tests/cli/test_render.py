"""What a person sees of jobs on a cluster."""

import io
from typing import Any

import pytest
from rich.console import Console

from bamboo.remote.job_view import render
from bamboo.remote.job_view.parsing import events_of, workers_of
from bamboo.remote.job_view.render import JobSnapshot
from bamboo_core.text import printable
from bamboo_core.view.job_view import view_of
from remote_kit import NOW, Json, condition, ended, event, job, node, plan, pod, stamp

DEGRADED = condition("Degraded", True, "Unprotected", "stage 2 of pipeline 0 has no second copy")


def snapshot(body: Json | None = None, pods: list[Json] | None = None, **more: Any) -> JobSnapshot:
    found = view_of(body or job())
    pods = [pod(n) for n in range(5)] if pods is None else pods
    nodes = {f"node-{n}": node(f"node-{n}") for n in range(3)}
    return JobSnapshot(job=found, workers=workers_of(found, pods, nodes), **more)


def drawn(picture: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture)
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
    text = drawn(render.status(snapshot(body, events=told, missing=("events: permission denied",)), NOW, 80))
    for part in (
        "story  Degraded  team, epoch 2, 10m old",
        "step 100/1000, loss 2.5000, 130.1 samples/s, ETA 2:05",
        "1 of 1 pipeline, 5 of 5 workers ready, 1 preemption, 2 takeovers",
        "cost 0.1234 so far, 4.50 an hour, about 0.2797 at the end",
        "2 find no node",
        "degraded for 60s: stage 2 of pipeline 0 has no second copy",
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


def test_wide_grids_are_continued_below() -> None:
    row = [f"story-w{n}" for n in range(30)]
    text = drawn(render.status(snapshot(job(plan=plan(row, row[::-1]))), NOW, 80))
    for stage in (0, 7, 15, 29):
        assert text.count(f"stage {stage} ") + text.count(f"stage {stage}\n") == 1
    assert text.count("pipeline ┃") > 2


@pytest.mark.parametrize("height", [10, 15, 20, 24, 40, 60])
@pytest.mark.parametrize("count", [0, 5, 40])
def test_the_live_picture_fits_the_terminal_as_far_as_it_can(height: int, count: int) -> None:
    told = tuple(events_of(view_of(job()), [event("story", f"E{n}", "m " * 60, n) for n in range(20)], [], []))
    picture = render.live(snapshot(pods=[pod(n) for n in range(count)], events=told), NOW, 80, height, "q leaves")
    lines = drawn(picture).splitlines()
    head = 8  # the job and its grid, which are always shown
    assert len(lines) <= max(height, head + 1)
    assert lines[-1] == "q leaves"
    if height >= 24:
        assert any("E0" in line for line in lines), "the newest event is missing"
        assert any("more workers" in line for line in lines) == (count == 40 and height < 50)


def test_what_needs_attention_comes_first_where_there_is_no_room_for_all() -> None:
    pods = [pod(n) for n in range(9)] + [pod(9, **ended(1))]
    pods[8]["metadata"]["deletionTimestamp"] = stamp(-9)
    listed, used = render.workers_within(snapshot(pods=pods), NOW, 80, 5)
    text = "\n".join(drawn(part) for part in listed)
    assert used == len(text.splitlines()) == 5
    assert "leaving" in text
    assert "failed" not in text
    assert "and 7 more workers" in text


def test_a_list_of_jobs_has_a_line_for_each() -> None:
    jobs = [view_of(job()), view_of(job("late", state="Complete", conditions=[condition("Complete", True)]))]
    assert drawn(render.jobs(jobs, NOW)).splitlines() == [
        "NAME   STATE         STEP  PIPELINES  WORKERS  PROTECTED  PREEMPTIONS  AGE",
        "story  Running   100/1000        1/1      5/5  -                    0  10m",
        "late   Complete  100/1000        1/1      5/5  -                    0  10m",
    ]
    spaced = drawn(render.jobs(jobs, NOW, namespaces=True), width=200).splitlines()
    assert spaced[1].split() == ["team", "story", "Running", "100/1000", "1/1", "5/5", "-", "0", "10m"]


def test_a_job_that_is_over_says_how_and_complains_of_nothing_else() -> None:
    over = [
        condition("WorkersReady", False, "JobOver", "the job is over"),
        condition("Running", False, "JobOver", "the job is over"),
        condition("Failed", True, "StageLost", "stage 1 is lost"),
    ]
    text = drawn(render.status(snapshot(job(state="Failed", conditions=over), pods=[]), NOW, 80))
    assert "Failed: stage 1 is lost" in text
    assert "the job is over" not in text
    assert "ETA" not in text


def test_others_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b]0;x\x07b\x1b[31mc\x1b[0m\r\td") == "a ]0;x bc \td"
    assert printable("\x1b[2J\x1b[31mred\x1b[0m", colours=True) == " [2J\x1b[31mred\x1b[0m"
