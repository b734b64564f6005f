"""Events for the coordinator about workers' pods and nodes: each one once."""

from collections import Counter
from typing import Any

import pytest

from bamboo_core import names
from bamboo_core.control.protocol import Hello
from bamboo_core.coordinator.events import Event, NoticeWithdrawn, PreemptionNotice, WorkerLost
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.signals.worker_watch import WorkerWatch
from operator_kit import JOB_UID, at, node, stored
from opsim_kopf import node_event, pod_event

KEY, NAME = ("default", "tiny"), "tiny-w0"
ITN = "AwsSpotInterruption"
TAINTS = {ITN: "aws-node-termination-handler/spot-itn"}
TERMINATED = {"exitCode": 1, "reason": "Error"}


class Cluster:
    """A job's pod on a node, and the watch of both."""

    def __init__(self, **pod: Any) -> None:
        self.cache, self.signals = ClusterIndices(), Counter[str]()
        self.watch = WorkerWatch(JobIdentity(KEY, JOB_UID), self.cache, (), self.signals)
        self.pod(**pod)
        self.node()

    def pod(self, *, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
        made = stored(node="n1", phase=phase, **metadata)
        if phase == "Failed":
            made["status"]["containerStatuses"] = [{"name": "trainer", "state": {"terminated": TERMINATED}}]
        pod_event(self.cache, "MODIFIED", made)
        return made

    def node(self, *marks: str, **labels: str) -> None:
        marked = node(taints={TAINTS[mark]: "e" for mark in marks}, labels=labels)
        marked["metadata"]["uid"] = "n"
        node_event(self.cache, "MODIFIED", marked)

    def heard(self) -> Event | None:
        return self.watch.pod_changed(NAME)


def test_a_notice_is_told_with_its_cause_and_withdrawn_when_the_objects_do_not_show_it_any_more() -> None:
    cluster = Cluster()
    cluster.node(ITN)
    notice = cluster.heard()
    assert isinstance(notice, PreemptionNotice)
    assert (notice.worker, notice.seconds, notice.wanted) == (NAME, 120.0, False)
    assert notice.cause is not None
    assert (notice.cause.reason, notice.cause.message.startswith(f"{NAME}: ")) == (ITN, True)
    cluster.node()
    assert cluster.heard() == NoticeWithdrawn(NAME)


def test_a_worker_is_lost_once_and_nothing_is_told_of_it_after_that() -> None:
    cluster = Cluster()
    lost = cluster.watch.node_deleted(NAME, "n1")
    assert isinstance(lost, WorkerLost)
    assert (lost.worker, lost.exit_code, lost.removed) == (NAME, None, False)
    cluster.node(ITN)
    assert cluster.heard() is cluster.watch.pod_deleted(cluster.pod()) is None
    assert (cluster.watch.uid_of(NAME), cluster.watch.uid_of("tiny-w9")) == ("", None)
    assert cluster.signals == {"NodeDeleted": 1}


@pytest.mark.parametrize("forced", [False, True])
def test_a_deleted_pod_was_removed_only_if_that_was_forced(forced: bool) -> None:
    cluster = Cluster()
    if forced:
        cluster.watch.removal_forced(NAME)
    lost = cluster.watch.pod_deleted(cluster.pod())
    assert isinstance(lost, WorkerLost)
    assert lost.removed == forced


def test_a_worker_that_ends_is_lost_with_its_exit_code() -> None:
    cluster = Cluster()
    cluster.pod(phase="Failed")
    lost = cluster.heard()
    assert isinstance(lost, WorkerLost)
    assert lost.exit_code == 1


@pytest.mark.parametrize(
    ("known_lost", "resumed", "lost"), [((), True, set()), ((), False, {NAME}), ((NAME,), True, {NAME})]
)
def test_pods_that_are_being_deleted_are_of_no_use_to_a_training_that_begins(
    known_lost: tuple[str, ...], resumed: bool, lost: set[str]
) -> None:
    cluster = Cluster(deletionTimestamp=at(30))
    cluster.watch.begin(known_lost, resumed=resumed)
    assert cluster.watch.lost == lost


def test_where_a_worker_is_is_told_by_its_node() -> None:
    cluster, hello = Cluster(), Hello(worker=NAME, host="h", port=1, zone="own")
    assert (cluster.watch.located(hello).node, cluster.watch.located(hello).zone) == ("n1", "own")
    cluster.node(**{names.LABEL_ZONE: "b"})
    assert cluster.watch.located(hello).zone == "b"
