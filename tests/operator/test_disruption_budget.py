"""The PodDisruptionBudget of a job: its minAvailable, its changes with replicas and pods, and refused writes."""

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest

from bamboo_core.coordinator.events import WorkerState
from bamboo_operator.pods.disruption_budget import REPAIR_SECONDS, disruption_budget, least_healthy
from operator_kit import JOB_UID, job, said
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_kit"]

OLDEST = 29  # minor version of Kubernetes that Bamboo supports
FOUR = {"topology": {"stages": 4, "pipelines": 1}}
ROW = tuple((f"w{n}", True) for n in range(4))
HALF = (*ROW[:3], ("w3", False))
PAIRS = {"spread": {"workersPerNode": 2}}
TRAINING = WorkerState.TRAINING


def workers(**states: WorkerState) -> Any:
    return tuple((f"w{n}", states.get(f"w{n}", TRAINING)) for n in range(4))


@pytest.mark.parametrize(
    ("status", "spec", "joined", "least"),
    [
        ({"grid": (ROW,)}, FOUR, 4, 3),
        ({"grid": (ROW,)}, FOUR | {"standby": {"workers": 1}}, 5, 4),
        ({"grid": (HALF,)}, FOUR, 4, 4),  # the next one could be the only holder
        ({"grid": (HALF,), "replicas": 1}, FOUR | PAIRS, 4, 3),  # on one node only, but one worker may leave it
        ({"grid": (ROW,), "workers": workers(w1=WorkerState.LEAVING)}, FOUR, 3, 3),  # one at a time
        ({"grid": (ROW,)}, FOUR, 3, 2),  # fewer than wanted, for want of nodes, but protected again
        ({"grid": (), "phase": "Pending"}, FOUR, 4, None),
        ({"grid": (HALF,)}, FOUR | {"redundancy": {"mode": "None"}}, 4, None),
        ({"grid": (ROW, HALF)}, {"topology": {"stages": 4, "pipelines": 2}, "redundancy": {"mode": "None"}}, 8, 8),
        ({"grid": ((("w0", False),),)}, {"topology": {"stages": 1, "pipelines": 1}}, 1, None),  # needs a second worker
        ({"grid": ((("w0", False),),)}, {"topology": {"stages": 1, "pipelines": 1}, "standby": {"workers": 1}}, 1, 1),
    ],
)
def test_the_budget_leaves_as_many_workers_as_redundancy_needs(
    status: dict[str, Any], spec: dict[str, Any], joined: int, least: int | None
) -> None:
    assert least_healthy(said(**status), job(**spec), joined) == least


def test_the_budget_is_the_jobs_own_and_goes_with_it() -> None:
    made = disruption_budget(job(), JOB_UID, 3, [0, 2, 3, 5])
    for minor in range(OLDEST, 38):
        assert kubernetes_validate.validate(made, f"1.{minor}", strict=True)
    assert made["metadata"]["name"] == f"bamboo-{JOB_UID}"
    (owned,) = made["metadata"]["ownerReferences"]
    assert (owned["kind"], owned["uid"]) == ("BambooJob", JOB_UID)
    assert made["spec"] == {
        "minAvailable": 3,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {
            "matchLabels": {"bamboo.dev/job-uid": JOB_UID},
            "matchExpressions": [{"key": "bamboo.dev/worker-index", "operator": "In", "values": ["0", "2", "3", "5"]}],
        },
    }


async def test_it_follows_protection_and_the_pods_that_there_are(begin: Callable[..., Job]) -> None:
    place = Place()
    started = begin(place, **FOUR)
    await started.start()
    assert place.budgets == [], "there is nothing to protect before the first plan"
    await started.reconciles()
    assert place.budgets == [4]
    started.fill()
    await started.reconciles()
    assert place.budgets == [4, 3]
    await started.reconciles(seconds=REPAIR_SECONDS - 1)
    assert place.budgets == [4, 3], "no call without a cause"
    name = sorted(place.pods)[1]
    place.kubelets = False
    place.mark(name)  # as an eviction does
    await started.ticks(0.0)
    await started.reconciles(count=1)
    assert place.budgets[-1] == 3, "three are left, and none of them may go now"


async def test_without_the_right_to_make_one_everything_else_goes_on(begin: Callable[..., Job]) -> None:
    place = Place()
    place.no_budgets = True
    started = begin(place, **FOUR)
    await started.start()
    await started.controller.reconcile()
    started.fill()
    await started.controller.reconcile()
    refusals = [emit.message for emit in started.runner.events if emit.reason == "ClusterRefuses"]
    assert refusals == ["no PodDisruptionBudget for the workers: may not patch poddisruptionbudgets"]


async def test_a_refusal_that_passes_does_not_end_the_care_for_it(begin: Callable[..., Job]) -> None:
    """A starting API server may refuse a budget; the operator tries again only after a minute."""
    place = Place()
    started = begin(place, **FOUR)
    await started.start()
    await started.reconciles()
    assert place.budgets == [4]
    place.no_budgets = True
    started.fill()
    await started.reconciles()
    place.no_budgets = False
    await started.reconciles()
    assert place.budgets == [4], "it is not tried again in each pass"
    await started.reconciles(seconds=61.0)
    assert place.budgets == [4, 3]
