"""The remote commands' pure parts: what objects say, what is drawn, what is lost."""

import io
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from bamboo.kube.errors import RemoteError, UsageError
from bamboo.names import worker_name
from bamboo.remote.job_view import phrases, render
from bamboo.remote.job_view.job_reader import UnseenEvents
from bamboo.remote.job_view.objects import events_of, is_worker_of, job_of, workers_of
from bamboo.remote.job_view.render import JobSnapshot
from bamboo.remote.session import target
from bamboo.text import printable
from remote_kit import NOW, SPEC, Json, condition, ended, event, job, node, plan, pod, stamp

SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}
PULLING = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
CREATING = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
DEGRADED = condition("Degraded", True, "Unprotected", "stage 2 of pipeline 0 has no second copy")


def snapshot(body: Json | None = None, pods: list[Json] | None = None, **more: Any) -> JobSnapshot:
    found = job_of(body or job())
    pods = [pod(n) for n in range(5)] if pods is None else pods
    nodes = {f"node-{n}": node(f"node-{n}") for n in range(3)}
    return JobSnapshot(job=found, workers=workers_of(found, pods, nodes), **more)


def drawn(picture: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return "\n".join(line.rstrip() for line in text.splitlines())


# What objects say


@pytest.mark.parametrize(
    ("status", "deleted", "state", "detail"),
    [
        ({}, False, "training", ""),
        ({}, True, "leaving", "its pod is being deleted"),
        (ended(0, "Completed"), False, "ended", ""),
        (ended(0, "Completed"), True, "ended", ""),
        (ended(137, "OOMKilled"), False, "failed", "OOMKilled, exit code 137"),
        ({"phase": "Failed", "reason": "Evicted", "containerStatuses": []}, False, "failed", "Evicted"),
        ({"phase": "Pending", "containerStatuses": [], "conditions": [SCHEDULED]}, False, "pending", "0/4 nodes are"),
        ({"phase": "Pending", "containerStatuses": [PULLING]}, False, "starting", "ImagePullBackOff: not found"),
        ({"phase": "Pending", "containerStatuses": [CREATING]}, False, "starting", ""),
    ],
)
def test_a_pod_says_how_its_worker_is(status: Json, deleted: bool, state: str, detail: str) -> None:
    body = pod(1, **status)
    if deleted:
        body["metadata"]["deletionTimestamp"] = stamp(-20)
    worker = workers_of(job_of(job()), [body])[0]
    assert (worker.state, worker.cells) == (state, ((0, 1),))
    assert detail in worker.detail
    assert bool(worker.detail) == bool(detail)


def test_a_running_worker_without_a_stage_is_a_spare_or_waits() -> None:
    assert workers_of(job_of(job()), [pod(4)])[0].state == "spare"
    assert workers_of(job_of(job(plan=None)), [pod(4)])[0].state == "waiting"


def test_workers_of_an_earlier_job_of_the_name_are_not_the_jobs() -> None:
    stranger = pod(7)
    stranger["metadata"]["ownerReferences"][0]["uid"] = "another"
    found = workers_of(job_of(job()), [pod(10), pod(2), stranger], {"node-2": node("node-2")})
    assert [(w.name, w.zone) for w in found] == [("story-w2", "zone-2"), ("story-w10", "")]


def test_a_job_without_a_status_is_pending() -> None:
    body = job()
    del body["status"]
    found = job_of(body)
    assert (found.state, found.steps, found.plan, found.exit_code) == ("Pending", 1000, (), None)
    assert "is bamboo-operator running" in (phrases.why_waiting(found) or "")


def test_what_is_null_is_absent() -> None:
    body = job(training=None, lastTakeover=None, cost={"total": None}, spec={**SPEC, "standby": None})
    found = job_of(body)
    assert (found.step, found.steps, found.standby, found.last_takeover, found.cost) == (0, 1000, 0, None, None)


def test_a_field_of_another_type_is_named_in_one_sentence() -> None:
    sentence = (
        r"^cannot read BambooJob story as the API server sends it: Expected `int`.* `\$\.status\.workers\.desired`$"
    )
    with pytest.raises(RemoteError, match=sentence):
        job_of(job(workers={"desired": "many"}))


@pytest.mark.parametrize("written", ["", "{", "[]", '{"pipelines": 3}', '{"other": []}'])
def test_a_plan_that_is_not_understood_is_none(written: str) -> None:
    assert job_of(job(plan=written)).plan == ()


@pytest.mark.parametrize(
    ("kind", "reason", "code"),
    [
        ("Complete", "Complete", 0),
        ("Failed", "TaskFailed", 1),
        ("Failed", "StageLost", 3),
        ("Failed", "WorkersGone", 3),
        ("Degraded", "Unprotected", None),
    ],
)
def test_the_outcome_is_an_exit_code(kind: str, reason: str, code: int | None) -> None:
    assert job_of(job(conditions=[condition(kind, True, reason)])).exit_code == code


def test_reasons_that_nothing_can_recover_are_the_coordinators() -> None:
    """The same words as in the core's decisions."""
    from pathlib import Path

    import bamboo
    from bamboo.remote.job_view.objects import UNRECOVERABLE

    source = "".join(p.read_text() for p in Path(bamboo.__file__).parent.rglob("*.py"))
    told = re.findall(r'(?:Outcome\.UNRECOVERABLE|\blost\(turn|_begin_to_look\(turn), "(\w+)"', source)
    assert set(told) == set(UNRECOVERABLE)


@pytest.mark.parametrize("name", ["story", "a" * 60, "story-w1"])
def test_pods_are_known_by_their_names(name: str) -> None:
    assert is_worker_of(name, worker_name(name, 12))
    assert not is_worker_of(name, worker_name(name + "x", 12))
    assert not is_worker_of(name, name)


def test_events_of_job_and_pods_are_told_in_order() -> None:
    of_job = [
        event("story", "Started", "it trains", 20),
        event(
            "story", "Old", "of an earlier job", 20, involvedObject={"kind": "BambooJob", "name": "story", "uid": "x"}
        ),
    ]
    of_pods = [
        event("story-w1", "Pulled", "image is there", 40),
        event("other-w1", "Pulled", "image is there", 40),
        event("story-w9", "Killing", "stopping", 5, type="Warning"),
        event("story-w2", "Scheduled", "long before the job", 10_000),
    ]
    found = events_of(job_of(job()), of_job, of_pods, ["story-w1"])
    assert [(h.about, h.reason, h.warning) for h in found] == [
        ("story-w1", "Pulled", False), ("story", "Started", False), ("story-w9", "Killing", True),
    ]  # fmt: skip


def test_an_events_time_is_found_in_all_forms() -> None:
    new = {"lastTimestamp": None, "eventTime": stamp(7), "series": {"count": 3, "lastObservedTime": stamp(3)}}
    found = events_of(job_of(job()), [event("story", "Again", "", **new)], [], [])[0]
    assert ((NOW - found.at).total_seconds(), found.count) == (3, 3)


def test_an_event_is_told_once_and_again_when_it_happens_again() -> None:
    unseen, first = UnseenEvents(), events_of(job_of(job()), [event("story", "X", "m")], [], [])
    again = events_of(job_of(job()), [event("story", "X", "m", count=2)], [], [])
    assert [len(unseen.of(tuple(found))) for found in (first, first, again, again)] == [1, 0, 1, 0]


# What is drawn


def test_the_status_page_fits_80_columns_and_says_everything() -> None:
    taken = {
        "time": stamp(9),
        "victim": "story-w9",
        "worker": "story-w1",
        "pipeline": 0,
        "stage": 2,
        "pauseSeconds": 0.0187,
    }
    row = ["story-w0", "story-w1", "story-w1", "story-w3"]
    body = job(
        state="Degraded", plan=plan(row), lastTakeover=taken, preemptions=1, takeovers=2, restarts=1,
        conditions=[condition("Accepted", True), condition("WorkersReady", False, "Unschedulable", "2 find no node"),
                    condition("Running", True), DEGRADED, condition("Failed", False, "NotFailed")],
    )  # fmt: skip
    told = tuple(events_of(job_of(body), [event("story", "TakenOver", "long " * 30, 9, type="Warning")], [], []))
    text = drawn(render.status(snapshot(body, events=told, missing=("events: permission denied",)), NOW, 80))
    for part in (
        "story  Degraded  team, epoch 2, 10m old",
        "step 100/1000, loss 2.5000, 130.1 samples/s, ETA 2:05",
        "1 of 1 pipeline, 5 of 5 workers ready (5 spot), 1 preemption, 2 takeovers",
        "cost 0.1234 so far, 4.50 an hour, about 0.2797 at the end",
        "last takeover: w1 took over stage 2 of pipeline 0 from w9; the stage stood still",
        "for 19 ms",
        "2 find no node",
        "degraded for 60s: stage 2 of pipeline 0 has no second copy",
        "not shown: events: permission denied",
        "0 │ w0      │ w1*     │ w1*     │ w3",
        "* runs more than one stage until a replacement is ready",
        "w1      training  0/1 0/2  node-1  zone-1  Spot       5m",
        "w4      spare     -        node-1",
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
    told = tuple(events_of(job_of(job()), [event("story", f"E{n}", "m " * 60, n) for n in range(20)], [], []))
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


def test_a_list_of_jobs_has_a_line_for_each_and_more_columns_if_wide() -> None:
    jobs = [job_of(job()), job_of(job("late", state="Complete", conditions=[condition("Complete", True)]))]
    assert drawn(render.jobs(jobs, NOW)).splitlines() == [
        "NAME   STATE         STEP  PIPELINES  WORKERS  PROTECTED  PREEMPTIONS  AGE",
        "story  Running   100/1000        1/1      5/5  -                    0  10m",
        "late   Complete  100/1000        1/1      5/5  -                    0  10m",
    ]
    wide = drawn(render.jobs(jobs, NOW, wide=True, namespaces=True), width=200).splitlines()
    assert wide[1].split() == ["team", "story", "Running", "100/1000", "1/1", "5/5", "-", "0", "10m", "0", "130.1",
                               "2.5000", "2:05", "0.1234", "2"]  # fmt: skip
    assert wide[2].split()[-5:] == ["-", "2.5000", "-", "0.1234", "2"]


def test_a_job_that_is_over_says_how_and_complains_of_nothing_else() -> None:
    over = [condition("WorkersReady", False, "JobOver", "the job is over"),
            condition("Running", False, "JobOver", "the job is over"),
            condition("Failed", True, "StageLost", "stage 1 is lost")]  # fmt: skip
    text = drawn(render.status(snapshot(job(state="Failed", conditions=over), pods=[]), NOW, 80))
    assert "Failed: stage 1 is lost" in text
    assert "the job is over" not in text
    assert "ETA" not in text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (119, "119s"), (121, "2m"), (7199, "119m"), (7200, "2h"), (47 * 3600, "47h"), (49 * 3600, "2d")],
)
def test_an_age_is_said_in_its_largest_units(seconds: int, said: str) -> None:
    assert phrases.age(NOW - timedelta(seconds=seconds), NOW) == said


@pytest.mark.parametrize(("seconds", "said"), [(0, "less than 1 ms"), (0.019, "19 ms"), (1.254, "1.25 s")])
def test_a_pause_is_said_in_milliseconds_or_seconds(seconds: float, said: str) -> None:
    assert phrases.pause(seconds) == said


def test_silence_is_noticed_only_while_the_job_runs() -> None:
    old = {"step": 1, "steps": 2, "lastReportedTime": stamp(300)}
    assert "no progress has been reported for 5m" in (phrases.stale(job_of(job(training=old)), NOW) or "")
    assert phrases.stale(job_of(job()), NOW) is None
    assert phrases.stale(job_of(job(training=old, conditions=[condition("Complete", True)])), NOW) is None


def test_others_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b]0;x\x07b\x1b[31mc\x1b[0m\r\td") == "a ]0;x bc \td"
    assert printable("\x1b[2J\x1b[31mred\x1b[0m", colours=True) == " [2J\x1b[31mred\x1b[0m"


# Consequences


KEEPING = {**SPEC, "checkpoint": {"storage": {"uri": "s3://user:pass@bucket/x?sig=abc"}, "everySteps": 9}}
WAITING = condition("Running", False)


@pytest.mark.parametrize(
    ("spec", "status", "said"),
    [
        (SPEC, {}, "saves no checkpoints: it will start from step 0, which loses its 100 steps"),
        (SPEC, {"training": {"step": 0, "steps": 9}}, None),
        (KEEPING, {"conditions": [WAITING]}, "has no checkpoint yet: it will start from step 0"),
        (KEEPING, {"conditions": [WAITING], "checkpoint": {"lastStep": 99}}, "at step 99, which loses 1 step"),
        (KEEPING, {"conditions": [condition("Running", True)]}, None),  # its state is kept first
        ({**SPEC, "suspend": True}, {}, None),
        (SPEC, {"conditions": [condition("Complete", True)]}, None),
    ],
)
def test_who_suspends_is_told_which_steps_are_lost(spec: Json, status: Json, said: str | None) -> None:
    found = phrases.suspending(job_of(job(spec=spec, **status)))
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


def test_the_line_of_checkpoints_says_where_without_credentials_how_old_and_what_going_back_cost() -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    known = {"checkpoint": {"lastStep": 99, "lastTime": "2026-03-01T12:00:00Z"}, "restores": 2, "repeatedSteps": 12}
    found = phrases.checkpoint(job_of(job(spec=KEEPING, cost={"repeated": "0.3100"}, **known)), at + timedelta(hours=2))
    place = "s3://bucket/x"
    assert found == (
        f"checkpoint: step 99, 2:00:00 old, in {place}; went back 2 times; 12 steps repeated (0.3100 of the cost)"
    )
    assert phrases.checkpoint(job_of(job(spec=KEEPING)), at) == f"checkpoint: none yet, in {place}"
    claim = {**SPEC, "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "data"}}}}
    assert phrases.checkpoint(job_of(job(spec=claim)), at) == "checkpoint: none yet, in claim data"
    assert phrases.checkpoint(job_of(job()), at) == "", "it keeps none"


def test_the_line_of_evaluations_has_the_newest_and_the_best() -> None:
    newest = {"step": 40, "metrics": {"accuracy": 0.25, "loss": 2.5}}
    told = "evaluation after step 40: loss 2.5, accuracy 0.25"

    def line(**more: Any) -> str:
        return phrases.evaluation(job_of(job(training={"evaluation": {**newest, **more}})))

    assert line() == told
    assert line(bestStep=40, bestMetrics=newest["metrics"]) == f"{told} (the best so far)"
    assert line(bestStep=30, bestMetrics={"loss": 2.0}) == f"{told}; the best after step 30: loss 2"
    assert phrases.evaluation(job_of(job())) == "", "nothing was evaluated"


# Names


@pytest.mark.parametrize(
    ("given", "name", "namespace"),
    [
        ("story", "story", None),
        ("bj/story", "story", None),
        ("bamboojob.bamboo.dev/story", "story", None),
        ("FILE", "tale", "team"),
    ],
)
def test_jobs_are_named_by_name_or_file(tmp_path: Any, given: str, name: str, namespace: str | None) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("metadata: {name: tale, namespace: team}\n")
    found = target(str(file) if given == "FILE" else given)
    assert (found.name, found.namespace) == (name, namespace)


@pytest.mark.parametrize("given", ["", "No", "a/b", "no-such.yaml", "-x", "../story"])
def test_other_names_are_refused(given: str) -> None:
    with pytest.raises(UsageError):
        target(given)
