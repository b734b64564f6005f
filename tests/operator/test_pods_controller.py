"""A job's pods: gated, refused, unwanted, or not in the watch; repairs of NetworkPolicy and PodDisruptionBudget."""

from collections.abc import Callable
from typing import Any

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.pods.disruption_budget import REPAIR_SECONDS
from operator_kit import job
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_kit"]
POOLS = [{"name": "spot"}, {"name": "dear", "afterSeconds": 300}]
GATE = {"name": "example.com/hold"}
GATED = {"template": {"spec": {"schedulingGates": [GATE]}}}


# while the watch is interrupted


async def test_who_trains_is_not_taken_for_one_that_finds_no_node(begin: Callable[..., Job]) -> None:
    """While the watch is interrupted a training worker's pod still shows no node; the operator leaves it alone."""
    place = Place()
    training = begin(place, nodePools=POOLS)
    await training.reconciles()
    for name in place.pods:
        place.find_no_node(name)
    assert list(training.problems()) == ["Unschedulable"]
    training.train()
    await training.reconciles(5000)
    assert (place.deleted, training.told().count("FallbackPool"), training.problems()) == ([], 0, {})


def runs_and_is_silent(place: Place) -> None:
    for name in place.pods:
        place.run(name, 700)


def waits_for_a_node(place: Place) -> None:
    """Do nothing, so that the pods stay without a node."""


@pytest.mark.parametrize(
    ("happens", "reason"), [(waits_for_a_node, "FallbackPool"), (runs_and_is_silent, "WorkerSilent")]
)
async def test_a_pod_whose_deletion_nobody_has_told_of_is_deleted_and_told_of_once(
    begin: Callable[..., Job], happens: Callable[[Place], None], reason: str
) -> None:
    place = Place()
    started = begin(place, nodePools=POOLS)
    await started.reconciles()
    happens(place)
    place.kubelets = place.shown = False
    await started.reconciles(610)
    await started.reconciles(10)
    assert place.deleted == ["tiny-w0", "tiny-w1"]
    assert started.told().count(reason) == 2


# held back by a gate


async def test_a_pod_that_a_gate_holds_back_keeps_its_place(begin: Callable[..., Job]) -> None:
    place = Place()
    queued = begin(place, nodePools=POOLS, worker=GATED)
    await queued.reconciles()
    await queued.reconciles(5000)
    assert place.pools() == {"tiny-w0": "spot", "tiny-w1": "spot"}
    assert (place.deleted, place.made) == ([], 2)
    assert queued.problems() == {"Gated": "2 worker(s) are held back by scheduling gates: example.com/hold"}
    assert [emit.warning for emit in queued.runner.events if emit.reason == "Gated"] == [False]


async def test_its_time_begins_when_its_gate_goes(begin: Callable[..., Job]) -> None:
    place = Place()
    queued = begin(place, nodePools=POOLS, worker=GATED)
    await queued.reconciles()
    await queued.reconciles(5000)
    place.open_gate("tiny-w0")
    await queued.reconciles()
    await queued.reconciles(290)
    assert place.deleted == []
    place.open_gate("tiny-w1")
    await queued.reconciles()
    await queued.reconciles(20)
    assert place.deleted == ["tiny-w0"], "the one whose gate went later still has time"
    assert place.pools() == {"tiny-w1": "spot", "tiny-w2": "dear"}
    assert "FallbackPool" in queued.told()
    await queued.reconciles(290)
    assert place.pools() == {"tiny-w2": "dear", "tiny-w3": "dear"}


# wanted, and not made yet


def of(pipelines: int, **spec: Any) -> dict[str, Any]:
    """Return spec fields that allow a job of two stages at most `pipelines` pipelines."""
    return {"elastic": {"maxWorkers": 2 * pipelines}, **spec}


async def test_the_wait_of_workers_that_got_nodes_does_not_count_for_later_ones(begin: Callable[..., Job]) -> None:
    place = Place()
    growing = begin(place, nodePools=POOLS, **of(1))
    await growing.reconciles()
    growing.edit(job(nodePools=POOLS, **of(2)))
    await growing.reconciles(290)
    for name in ("tiny-w0", "tiny-w1"):
        place.run(name, 0)
    await growing.reconciles(20)
    assert (place.made, place.deleted) == (4, [])
    await growing.reconciles(290)
    assert "tiny-w2" in place.deleted


async def test_what_a_quota_refused_is_not_made_when_it_is_not_wanted_any_more(begin: Callable[..., Job]) -> None:
    place = Place()
    place.room = 3
    scaled = begin(place, **of(4))
    await scaled.reconciles(10)
    assert (len(place.pods), scaled.controller.view().adding, scaled.runner.state.membership.requested) == (3, 5, 8)
    scaled.edit(job(**of(1)))
    place.room = 100
    await scaled.reconciles(10)
    assert place.made == 3, "more was made than is wanted"
    assert (sorted(place.pods), scaled.controller.view().adding) == (["tiny-w0", "tiny-w1"], 0)
    assert scaled.runner.state.membership.requested == 2, "the coordinator waits for workers that nobody makes"
    scaled.edit(job(**of(2)))
    await scaled.reconciles(10)
    assert (len(place.pods), place.made) == (4, 5)
    assert (scaled.controller.view().adding, scaled.runner.state.membership.requested) == (0, 4)


# refused


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (403, "Forbidden", 'pods "tiny-w0" is forbidden: exceeded quota: pods'),
        (403, "Forbidden", 'error looking up service account default/x: serviceaccount "x" not found'),
        (403, "Forbidden", 'violates PodSecurity "restricted:latest": hostNetwork'),
        (400, "BadRequest", 'admission webhook "policy.dev" denied the request: no'),
        (422, "Invalid", "spec.priority: Invalid value"),
        (500, "InternalError", 'failed calling webhook "policy.dev": connection refused'),
    ],
)
async def test_pods_that_are_refused_are_told_as_long_as_they_are(
    begin: Callable[..., Job], status: int, reason: str, message: str
) -> None:
    place = Place()
    place.refusal = ApiError(status, reason, message)
    started = begin(place)
    await started.reconciles()
    assert started.problems() == {"PodsRefused": f"2 worker(s) have no pod, which the API server refuses: {message}"}
    assert started.told().count("PodsRefused") == 1
    await started.reconciles()
    assert list(started.problems()) == ["PodsRefused"]
    assert started.told().count("PodsRefused") == 1
    place.refusal = None
    await started.reconciles()
    assert started.problems() == {}


async def test_an_api_server_that_is_busy_refuses_nothing(begin: Callable[..., Job]) -> None:
    place = Place()
    for status, reason in ((429, "TooManyRequests"), (503, "ServiceUnavailable"), (500, "Timeout")):
        place.refusal = ApiError(status, reason, "later")
        started = begin(place)
        await started.reconciles()
        assert started.problems() == {}
        assert started.controller.view().adding == 2


# what is about all workers


async def test_a_network_policy_or_budget_that_others_delete_or_change_is_repaired(begin: Callable[..., Job]) -> None:
    place = Place()
    running = begin(place)
    await running.reconciles()
    running.train()
    await running.reconciles()
    assert len(place.policies) == 1
    budgets = len(place.budgets)
    await running.reconciles(REPAIR_SECONDS - 1)
    assert (len(place.policies), len(place.budgets)) == (1, budgets)
    await running.reconciles(1)
    assert place.policies[1:] == place.policies[:1], "once, as it was"
    assert place.budgets[budgets:] == place.budgets[budgets - 1 : budgets]
