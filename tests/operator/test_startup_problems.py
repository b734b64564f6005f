"""Why workers do not start, and which of them are not wanted any more."""

import pytest

from bamboo_core.job.placement_spec import NodePool
from bamboo_operator.pods.pools import surplus_worker
from bamboo_operator.pods.starting.startup_problems import StartupProblem, is_unexplained, startup_problems
from operator_kit import at, pod

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


POOLS = (NodePool(name="spot"), NodePool(name="dear", after_seconds=5))


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


@pytest.mark.parametrize(
    ("waiting", "standby", "leaving", "wanted", "expected"),
    [
        ([], ["w3"], [], 4, None),  # as many as wanted
        ([], ["w3"], [], 3, "w3"),
        ([], [], [], 3, None),  # all are at work
        ([], ["w3"], ["w0"], 3, None),  # one at a time
        (["w1", "w2"], ["w3"], [], 2, "w2"),  # who waits goes first
        ([], ["w1", "w3"], [], 2, "w1"),  # of the last pool
    ],
)
def test_of_surplus_workers_who_waits_goes_before_who_idles(waiting, standby, leaving, wanted, expected):
    placed = {"w0": "spot", "w1": "dear", "w2": "dear", "w3": "spot"}
    assert surplus_worker(POOLS, placed, waiting, standby, leaving, wanted) == expected


def test_of_equals_the_newest_is_given_back():
    placed = {f"w{number}": "" for number in (2, 9, 10)}
    assert surplus_worker((), placed, [], list(placed), [], 1) == "w10"
