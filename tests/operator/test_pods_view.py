"""The operator's view of one job's pods: counts by node pool, the next pod's number, and ages."""

from datetime import timedelta
from typing import Any

import pytest

from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.objects import JobIdentity, api_time, utc_now
from bamboo_operator.pods.view import JobPods, age
from operator_kit import JOB_UID, pool, stored
from opsim_kopf import pod_event

KEY = ("default", "tiny")
NO_API: Any = None
SPOT = pool(name="spot")


def add(cluster: ClusterIndices, number: int, *, phase: str = "Pending", where: Any = SPOT, **more: Any) -> str:
    made = stored(number, phase=phase, where=where, **more)
    pod_event(cluster, "ADDED", made)
    return str(made["metadata"]["name"])


@pytest.fixture
def cluster() -> ClusterIndices:
    return ClusterIndices()


@pytest.fixture
def pods(cluster: ClusterIndices) -> JobPods:
    return JobPods(JobIdentity(KEY, JOB_UID), cluster, NO_API)


def test_pools_are_counted_and_paid_for_only_with_a_node(cluster: ClusterIndices, pods: JobPods) -> None:
    add(cluster, 0, node="n1", phase="Running")
    add(cluster, 1, where=pool(name="sure", capacity="OnDemand"))
    add(cluster, 2, where=None)
    assert pods.by_pool() == {"spot": 1, "sure": 1, "": 1}
    assert pods.paid_for(()) == {"spot": 1}
    assert pods.paid_for({"tiny-w1"}) == {"spot": 1, "sure": 1}, "it has one, of which no watch has told"


def test_numbers_go_on_after_the_largest_also_of_pods_that_have_ended(cluster: ClusterIndices, pods: JobPods) -> None:
    assert pods.next_number() == 0
    add(cluster, 4, phase="Failed")
    add(cluster, 2)
    assert pods.next_number() == 5


def test_the_age_of_a_pod_is_never_negative() -> None:
    for seconds, least, most in ((100, 99.0, 400.0), (-100, 0.0, 0.0)):
        created = api_time(utc_now() - timedelta(seconds=seconds))
        assert least <= age({"metadata": {"creationTimestamp": created}}) <= most
