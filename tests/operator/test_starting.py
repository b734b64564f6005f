"""Workers that have not joined: startup problems, scheduling gates, and the backoff before new requests."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bamboo_operator.pods.starting import (
    FIRST_BACKOFF,
    LAST_BACKOFF,
    LONGEST_MESSAGE,
    REPLACE_SECONDS,
    REPORT_SECONDS,
    GateReleases,
    StartBackoff,
    StartupProblem,
    event_problem,
    is_unexplained,
    join_problem,
    seconds_unjoined,
    startup_problems,
)
from operator_kit import at, job, pod
from pod_controller_kit import Job, Place

GATE = {"name": "example.com/held"}


def gated_pod(*gates: Any) -> dict[str, Any]:
    return {"metadata": {}, "spec": {"schedulingGates": list(gates)} if gates else {}}


def test_the_moment_when_a_gate_goes_is_kept_while_the_pod_waits() -> None:
    releases = GateReleases(job())
    releases.observe({"w0": gated_pod(GATE), "w1": gated_pod(GATE)}, 1.0)
    assert releases.at("w0") is None
    releases.observe({"w0": gated_pod(), "w1": gated_pod(GATE)}, 2.0)
    releases.observe({"w0": gated_pod(), "w1": gated_pod()}, 3.0)
    assert (releases.at("w0"), releases.at("w1")) == (2.0, 3.0)
    releases.observe({"w1": gated_pod()}, 4.0)
    assert (releases.at("w0"), releases.at("w1")) == (None, 3.0)


def test_a_pod_that_never_had_a_gate_was_never_released() -> None:
    releases = GateReleases(job())
    releases.observe({"w0": gated_pod()}, 1.0)
    assert releases.at("w0") is None


def test_one_that_may_have_had_a_gate_counts_as_released_when_it_is_first_seen_without() -> None:
    gated = GateReleases(job(worker={"template": {"spec": {"schedulingGates": [GATE]}}}))
    gated.observe({"w0": gated_pod(), "w1": gated_pod(GATE)}, 6.0)
    assert (gated.at("w0"), gated.at("w1")) == (6.0, None)


def test_workers_that_were_made_together_are_one_round() -> None:
    backoff = StartBackoff().after(0, 8, 100.0, "first").after(5, 9, 101.0, "second")
    assert (backoff.rounds, backoff.detail) == (1, "second")
    assert backoff.after(8, 9, 102.0, "third").rounds == 2


def test_each_round_in_vain_makes_the_next_wait_longer() -> None:
    backoff, pauses = StartBackoff(), []
    for number in range(12):
        backoff = backoff.after(number, number + 1, 50.0 * number, "")
        pauses.append(backoff.pause)
    assert pauses[:4] == [0, FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]
    assert pauses[-1] == LAST_BACKOFF
    assert backoff.holds(50.0 * 11 + LAST_BACKOFF - 1)
    assert not backoff.holds(50.0 * 11 + LAST_BACKOFF)


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


def pending(*conditions, **waiting):
    container = {"name": "trainer", "image": "x:1", "state": {"waiting": waiting}}
    found = pod(phase="Pending")
    found["status"] |= {"conditions": list(conditions), "containerStatuses": [container] if waiting else []}
    return found


def held(*gates):
    found = pending({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"})
    found["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
    return found


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], []),
        ([pod()], []),
        ([pending()], []),
        ([pending(reason="ContainerCreating")], []),
        (
            [pending(UNSCHEDULABLE), pending(UNSCHEDULABLE)],
            ["Unschedulable: 2 worker(s) cannot be scheduled: 0/3 nodes (w0, ...)"],
        ),
        (
            [pending(reason="ErrImagePull", message="not found"), pending(reason="ImagePullBackOff")],
            ["ImagePullBackOff: 2 worker(s) cannot start: ErrImagePull: not found (w0, ...)"],
        ),
        (
            [
                pending(
                    reason="ImagePullBackOff", message='Back-off pulling image "x:1": ErrImagePull: not found: "x:1"'
                )
            ],
            ['ImagePullBackOff: 1 worker(s) cannot start: ErrImagePull: not found: "x:1" (w0)'],  # as while it tries
        ),
        (
            [pending(reason="ImagePullBackOff", message='Back-off pulling image "x:1"')],  # of kubelets before 1.32
            ['ImagePullBackOff: 1 worker(s) cannot start: ImagePullBackOff: Back-off pulling image "x:1" (w0)'],
        ),
        (
            [pending(reason="CreateContainerConfigError", message='secret "s" not found')],
            [
                "CreateContainerConfigError: 1 worker(s) cannot start: CreateContainerConfigError:"
                ' secret "s" not found (w0)'
            ],
        ),
        (
            [pending(reason="InvalidImageName")],
            ["InvalidImageName: 1 worker(s) cannot start: InvalidImageName: x:1 (w0)"],
        ),
        ([pod(phase="Failed", ended={"exitCode": 1})], []),
        ([held("q/b", "q/a"), held("q/b")], ["Gated: 2 worker(s) are held back by scheduling gates: q/a, q/b"]),
        ([held()], []),  # the gates have just gone
        (
            [held("q/a"), pending(UNSCHEDULABLE), pending(reason="InvalidImageName")],
            [
                "InvalidImageName: 1 worker(s) cannot start: InvalidImageName: x:1 (w2)",
                "Unschedulable: 1 worker(s) cannot be scheduled: 0/3 nodes (w1)",
                "Gated: 1 worker(s) are held back by scheduling gates: q/a",
            ],
        ),
    ],
)
def test_startup_problems_are_named_once_for_all_pods(pods, expected):
    found = startup_problems({f"w{number}": each for number, each in enumerate(pods)})
    assert [f"{trouble.reason}: {trouble.message}" for trouble in found] == expected


def placed(*conditions, uid="u0", **waiting):
    found = pending(*conditions, **waiting)
    found["metadata"]["uid"] = uid
    found["spec"]["nodeName"] = "a"
    return found


SANDBOX = {"type": "PodReadyToStartContainers", "status": "True"}
UNMOUNTED = StartupProblem("FailedMount", 'FailedMount: secret "s" not found')


@pytest.mark.parametrize(
    ("found", "unexplained"),
    [
        (placed(), True),  # the kubelet has not said anything yet
        (placed(reason="ContainerCreating"), True),
        (placed({**SANDBOX, "status": "False"}, reason="PodInitializing"), True),
        (placed(SANDBOX, reason="ContainerCreating"), False),  # it pulls an image
        (placed(reason="ErrImagePull"), False),
        (pending(reason="ContainerCreating"), False),  # it has no node
        (placed(reason="ContainerCreating") | {"metadata": {"deletionTimestamp": at(0)}}, False),
        (pod(), False),
        (pod(phase="Failed", ended={"exitCode": 1}), False),
    ],
)
def test_a_pod_is_unexplained_while_its_status_does_not_tell_why_it_does_not_start(found, unexplained):
    found["spec"].setdefault("nodeName", "a" if found["status"]["phase"] != "Pending" else None)
    assert is_unexplained(found) == unexplained


def test_what_events_say_is_told_of_unexplained_pods_alone():
    pods = {
        "w0": placed(reason="ContainerCreating"),
        "w1": placed(uid="u1", reason="ErrImagePull", message="no"),
        "w2": placed(uid="u2"),
    }
    assert startup_problems(pods, dict.fromkeys(("u0", "u1", "u2"), UNMOUNTED)) == (
        StartupProblem("FailedMount", '2 worker(s) cannot start: FailedMount: secret "s" not found (w0, ...)'),
        StartupProblem("ImagePullBackOff", "1 worker(s) cannot start: ErrImagePull: no (w1)"),
    )
    assert [problem.reason for problem in startup_problems(pods)] == ["ImagePullBackOff"]


def test_a_pod_that_is_deleted_is_no_startup_problem():
    gone = pending(UNSCHEDULABLE)
    gone["metadata"]["deletionTimestamp"] = at(0)
    assert startup_problems({"w0": gone}) == ()
    assert startup_problems({"w0": gone, "w1": pending(UNSCHEDULABLE)}) == (
        StartupProblem("Unschedulable", "1 worker(s) cannot be scheduled: 0/3 nodes (w1)"),
    )


pytest_plugins = ["pod_controller_kit"]
SECRET = 'MountVolume.SetUp failed for volume "credentials" : secret "s3" not found'
MAP = 'MountVolume.SetUp failed for volume "config" : configmap "data" not found'
SUMMARY = "Unable to attach or mount volumes: unmounted volumes=[credentials]: timed out waiting for the condition"


def event(reason: str, message: str, when: float = 0.0) -> dict[str, Any]:
    return {"reason": reason, "message": message, "type": "Warning", "lastTimestamp": at(when)}


@pytest.mark.parametrize(
    ("events", "reason", "message"),
    [
        ([event("FailedMount", SECRET)], "FailedMount", SECRET),
        ([event("FailedMount", SECRET), event("FailedMount", SUMMARY, 120)], "FailedMount", SECRET),
        ([event("FailedMount", SUMMARY)], "FailedMount", SUMMARY),
        ([event("FailedMount", SECRET), event("FailedMount", MAP, 60)], "FailedMount", f"{MAP}; {SECRET}"),
        ([event("FailedMount", MAP, 60), event("FailedMount", SECRET)], "FailedMount", f"{MAP}; {SECRET}"),
        ([event("FailedMount", SECRET), event("FailedMount", MAP, 600)], "FailedMount", MAP),  # the first one has come
        ([event("FailedMapVolume", "no block")], "FailedMount", "no block"),
        (
            [event("FailedAttachVolume", "elsewhere"), event("FailedMount", SUMMARY, 9)],
            "FailedAttachVolume",
            "elsewhere",
        ),
        ([event("FailedCreatePodSandBox", "no handler")], "FailedCreatePodSandBox", "no handler"),
        ([event("NetworkNotReady", "no CNI")], "NetworkNotReady", "no CNI"),
        ([event("Pulling", "x", -5), event("FailedMount", SECRET)], "FailedMount", SECRET),
        ([event("Scheduled", "x", 9), event("FailedMount", SECRET)], "FailedMount", SECRET),
    ],
)
def test_the_newest_cause_is_told(events: list[dict[str, Any]], reason: str, message: str) -> None:
    found = event_problem(events)
    assert found is not None
    assert (found.reason, found.message) == (reason, f"{reason}: {message}")


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event("Scheduled", "x"), event("Unhealthy", "x")],
        [event("FailedMount", "failed to sync configmap cache"), event("Pulling", "x")],  # in the same second
        [event("FailedMount", SECRET), event("Started", "x", 600)],
    ],
)
def test_nothing_is_told_if_it_has_passed(events: list[dict[str, Any]]) -> None:
    assert event_problem(events) is None


@pytest.mark.parametrize(
    "when",
    [
        {"series": {"lastObservedTime": at(60.0)}, "eventTime": at(-900.0)},
        {"eventTime": at(60.0), "lastTimestamp": None},
        {"lastTimestamp": None, "metadata": {"creationTimestamp": at(60.0)}},
    ],
)
def test_an_event_tells_its_time_in_one_of_four_places(when: dict[str, Any]) -> None:
    newest = {"reason": "FailedMount", "message": MAP, **when}
    assert event_problem([event("FailedMount", SECRET, -120.0), newest]) == event_problem([event("FailedMount", MAP)])
    assert event_problem([newest, event("Started", "x", 61.0)]) is None


def test_a_message_of_any_length_is_cut() -> None:
    found = event_problem([event("FailedMount", "x" * 5000)])
    assert found is not None
    assert len(found.message) == LONGEST_MESSAGE


def uid(place: Place, name: str) -> str:
    found: str = place.pods[name]["metadata"]["uid"]
    return found


async def test_a_secret_that_is_missing_as_a_volume_is_named_until_it_is_there(begin: Callable[..., Job]) -> None:
    place = Place()
    waiting = begin(place)
    await waiting.reconciles()
    for name in ("tiny-w0", "tiny-w1"):
        place.stall(name, "ContainerCreating")
        place.events[uid(place, name)] = [event("FailedMount", SECRET)]
    await waiting.reconciles()
    assert (waiting.problems(), place.events_read) == ({}, []), "most pods only take a moment"
    await waiting.reconciles(FIRST_BACKOFF)
    told = f"2 worker(s) cannot start: FailedMount: {SECRET} (tiny-w0, ...)"
    assert waiting.problems() == {"FailedMount": told}
    assert [(emit.message, emit.warning) for emit in waiting.runner.events if emit.reason == "FailedMount"] == [
        (told, True)
    ]
    place.run("tiny-w0", 0)
    await waiting.reconciles()
    assert waiting.problems() == {"FailedMount": f"1 worker(s) cannot start: FailedMount: {SECRET} (tiny-w1)"}
    place.run("tiny-w1", 0)
    await waiting.reconciles()
    assert waiting.problems() == {}


async def test_without_the_right_to_list_events_everything_else_is_done(begin: Callable[..., Job]) -> None:
    place = Place()
    place.no_events = True
    waiting = begin(place)
    await waiting.reconciles()
    place.stall("tiny-w0", "ContainerCreating")
    await waiting.reconciles()
    place.take("tiny-w1")
    await waiting.reconciles(FIRST_BACKOFF)
    assert sorted(place.pods) == ["tiny-w0", "tiny-w2"]


NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def running_pod(started: datetime | None) -> dict[str, Any]:
    state = {"running": {"startedAt": started.strftime("%Y-%m-%dT%H:%M:%SZ")}} if started else {"waiting": {}}
    return {"status": {"containerStatuses": [{"name": "trainer", "state": state}]}}


def test_only_workers_that_run_and_have_not_joined_are_silent() -> None:
    pods = {
        "job-w0": running_pod(NOW - timedelta(seconds=300)),
        "job-w1": running_pod(NOW - timedelta(seconds=90)),
        "job-w2": running_pod(None),
        "job-w3": {"status": {"phase": "Pending"}},
    }
    assert seconds_unjoined(pods, {"job-w0"}, NOW - timedelta(hours=1), NOW) == {"job-w1": 90.0}
    assert seconds_unjoined(pods, {"job-w0"}, NOW - timedelta(seconds=20), NOW) == {"job-w1": 20.0}


def test_silence_is_told_once_it_lasts() -> None:
    assert join_problem({"job-w1": REPORT_SECONDS - 1}, "ws://x") is None
    found = join_problem({"job-w1": REPORT_SECONDS, "job-w2": REPLACE_SECONDS}, "ws://x")
    assert found is not None
    assert found.reason == "WorkerSilent"
    assert found.message.startswith("2 worker(s) are running but have not connected to ws://x: see the log of job-w1")
