"""The cost of a job's workers: paid time, edits of prices, and workers whose nodes the watch reports late."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_core.coordinator.events import PricesReported
from bamboo_core.job.spec import JobSpec
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs import cost_counter
from bamboo_operator.jobs.cost_counter import CostCounter, paid_seconds
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.pods.view import JobPods
from operator_kit import JOB_UID, NOW, at, job, pod, stored
from opsim_kopf import pod_event

NO_API: Any = None


def placed(seconds: float, **more: Any) -> dict[str, Any]:
    """Return a worker's pod that got its node `seconds` after NOW."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(seconds)}
    made = pod(**more)
    made["status"]["conditions"] = [scheduled]
    made["spec"]["nodeName"] = "n1"
    return made


ENDED = {"exitCode": 1, "finishedAt": at(-40)}


@pytest.mark.parametrize(
    ("made", "seconds"),
    [
        (placed(-1000), 100),
        (placed(-30), 30),
        (placed(-1000, phase="Failed", ended=ENDED), 60),
        (placed(-30, phase="Failed", ended=ENDED), 0),
        (placed(-1000, phase="Failed"), 0),
        (placed(-1000, deleted=at(10), grace=30), 80),
        (placed(-1000, deleted=at(-200), grace=30), 0),
        (placed(5), 0),
        (pod(phase="Pending"), 0),
    ],
    ids=[
        "all the time",
        "since it came",
        "until it ended",
        "ended before it came",
        "ended at a time that nobody tells",
        "until it was deleted",
        "deleted before",
        "a node's clock that is ahead",
        "without a node",
    ],
)
def test_a_node_is_paid_for_from_when_a_pod_has_it_until_its_worker_ends(made: dict[str, Any], seconds: float) -> None:
    assert paid_seconds(made, NOW - timedelta(seconds=100), NOW) == pytest.approx(seconds)


def test_before_anything_was_counted_nothing_was_left_out() -> None:
    assert paid_seconds(placed(-1000), None, NOW) == 0


# an edit of a price


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace cost_counter's clock. Return a list whose only value is the clock's time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(cost_counter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def priced(spot: str, sure: str) -> JobSpec:
    pools = [{"name": "spot", "pricePerHour": spot}, {"name": "sure", "capacity": "OnDemand", "pricePerHour": sure}]
    return job(nodePools=pools)


SPOT, SURE = priced("1", "10").node_pools


def counter_of(*pods: dict[str, Any]) -> tuple[CostCounter, ClusterIndices]:
    cluster = ClusterIndices()
    for made in pods:
        pod_event(cluster, None, made)
    known = JobPods(JobIdentity(("default", "tiny"), JOB_UID), cluster, NO_API)
    return CostCounter(known, JobMeter(OperatorCounts()), None), cluster


def test_time_is_counted_at_the_prices_of_its_own_and_never_again(clock: list[float]) -> None:
    """Each of two workers costs 1 in the first hour, 3 in the second and 5 in the third."""
    counter, _ = counter_of(*(stored(number, node="n", where=SPOT) for number in range(2)))
    totals = []
    for spot in ("1", "3", "5", "100"):
        counter.count(priced(spot, "10").node_pools, joined=())
        totals.append(float(counter.cost))
        clock[0] += 3600.0
    assert totals == [0.0, 2.0, 8.0, 18.0]


def test_an_edit_of_a_price_is_told_to_the_coordinator_of_each_worker_and_of_more() -> None:
    counter, _ = counter_of(*(stored(number, where=pool) for number, pool in enumerate((SPOT, SURE))))
    assert counter.prices(None) == PricesReported({})
    for spot in ("1", "2.5"):
        told = counter.prices(priced(spot, "10"))
        assert told.workers == {"tiny-w0": float(spot), "tiny-w1": 10.0}
        assert [price for price, _ in told.more] == [10.0], "what comes after a worker on demand is on demand"


def test_who_has_joined_is_paid_for_though_no_watch_has_told_of_its_node(clock: list[float]) -> None:
    """Only one of two workers has joined; the watch reports that worker's node two hours later."""
    counter, cluster = counter_of(*(stored(number, phase="Pending", where=SPOT) for number in range(2)))
    pools = priced("3", "10").node_pools
    counter.count(pools, joined={"tiny-w0"})
    for told in (False, True):
        clock[0] += 3600.0
        if told:
            pod_event(cluster, "MODIFIED", stored(0, node="n", where=SPOT))
        counter.count(pools, joined={"tiny-w0"})
    assert counter.cost == 6
    assert counter.paid == {"spot": 1}
