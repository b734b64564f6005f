"""The watch of a job's workers: each loss is reported once, and a worker's zone comes from its node."""

from collections import Counter
from typing import Any

import pytest

from bamboo_core import names
from bamboo_core.control.protocol import Hello
from bamboo_core.coordinator.events import WorkerLost
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.signals.worker_watch import WorkerWatch
from operator_kit import JOB_UID, node, stored
from opsim_kopf import node_event, pod_event

NAME = "tiny-w0"


def noted(cache: ClusterIndices, **more: Any) -> None:
    """Put the worker's node with these taints and labels into the index."""
    found = node(**more)
    found["metadata"]["uid"] = "n"
    node_event(cache, "MODIFIED", found)


@pytest.fixture
def cache() -> ClusterIndices:
    """Return the operator's indices with one worker's pod and its node."""
    made = ClusterIndices()
    pod_event(made, "MODIFIED", stored(node="n1"))
    noted(made)
    return made


def test_a_worker_is_lost_once_and_nothing_is_told_of_it_after_that(cache: ClusterIndices) -> None:
    signals = Counter[str]()
    watch = WorkerWatch(JobIdentity(("default", "tiny"), JOB_UID), cache, (), signals)
    lost = watch.node_deleted(NAME, "n1")
    assert isinstance(lost, WorkerLost)
    assert (lost.worker, lost.exit_code, lost.removed) == (NAME, None, False)
    noted(cache, taints={"aws-node-termination-handler/spot-itn": "e"})
    assert watch.pod_changed(NAME) is watch.pod_deleted(stored(node="n1")) is None
    assert (watch.uid_of(NAME), watch.uid_of("tiny-w9")) == ("", None)
    assert signals == {"NodeDeleted": 1}


def test_where_a_worker_is_is_told_by_its_node(cache: ClusterIndices) -> None:
    watch = WorkerWatch(JobIdentity(("default", "tiny"), JOB_UID), cache, (), Counter())
    hello = Hello(worker=NAME, host="h", port=1, zone="own")
    assert (watch.located(hello).node, watch.located(hello).zone) == ("n1", "own")
    noted(cache, labels={names.LABEL_ZONE: "b"})
    assert watch.located(hello).zone == "b"
