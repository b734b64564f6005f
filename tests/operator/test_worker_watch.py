"""What a coordinator is told of its workers' pods and nodes: each thing once, and again only when it matters again."""

from collections import Counter
from typing import Any

import pytest

from bamboo_core import names
from bamboo_core.control.protocol import Hello
from bamboo_core.coordinator.events import Emit, Event, NoticeWithdrawn, PreemptionNotice, WorkerLost
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.signals.signals import LEAST_SECONDS
from bamboo_operator.signals.worker_watch import NOTICE_EXPIRY_SECONDS, WorkerWatch
from operator_kit import META, at, node, render

KEY, NAME, NOW = ("default", "tiny"), "tiny-w0", 1000.0
ITN, KARPENTER = "AwsSpotInterruption", "KarpenterDisruption"
TAINTS = {ITN: "aws-node-termination-handler/spot-itn", KARPENTER: "karpenter.sh/disrupted"}
TERMINATED = {"exitCode": 1, "reason": "Error"}


class Cluster:
    """A job's pod on a node, and what is told of them."""

    def __init__(self, **pod: Any) -> None:
        self.cache, self.signals = ClusterCache(), Counter[str]()
        self.watch = WorkerWatch(JobIdentity(KEY, META.uid), self.cache, (), self.signals)
        self.pod(**pod)
        self.node()

    def pod(self, *, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
        made = render(number=0)
        made["metadata"] |= {"uid": "u", "namespace": KEY[0], **metadata}
        made["spec"] |= {"nodeName": "n1"}
        ended = [{"name": "trainer", "state": {"terminated": TERMINATED}}] if phase == "Failed" else []
        made["status"] = {"phase": phase, "containerStatuses": ended}
        self.cache.pod_event("MODIFIED", made)
        return made

    def node(self, *marks: str, **labels: str) -> None:
        marked = node(taints={TAINTS[mark]: "e" for mark in marks}, labels=labels)
        marked["metadata"]["uid"] = "n"
        self.cache.node_event("MODIFIED", marked)

    def heard(self, now: float = NOW) -> list[Event | Emit]:
        return self.watch.pod_changed(NAME, now)


def test_a_notice_is_told_once_and_again_if_it_ends_earlier() -> None:
    cluster = Cluster()
    assert cluster.heard() == []
    cluster.node(ITN)
    emit, notice = cluster.heard()
    assert isinstance(emit, Emit)
    assert (emit.reason, emit.message.startswith(f"{NAME}: ")) == (ITN, True)
    assert notice == PreemptionNotice(NAME, 120.0)
    assert cluster.heard(NOW + 60) == [], "the object says 120 s as long as the taint is there"
    (earlier,) = cluster.heard(NOW - 60)
    assert earlier == PreemptionNotice(NAME, 120.0)
    assert cluster.signals == {ITN: 1}


def test_a_notice_that_the_objects_do_not_show_any_more_is_withdrawn_once() -> None:
    cluster = Cluster()
    cluster.node(KARPENTER)
    cluster.heard()
    cluster.node()
    assert cluster.heard() == [NoticeWithdrawn(NAME)]
    assert cluster.heard() == []
    assert cluster.watch.open_notices(NOW) == []


def test_a_worker_is_lost_once_and_nothing_is_told_of_it_after_that() -> None:
    cluster = Cluster()
    (lost,) = cluster.watch.node_deleted(NAME, "n1")
    assert isinstance(lost, WorkerLost)
    assert (lost.worker, lost.exit_code, lost.removed) == (NAME, None, False)
    cluster.node(ITN)
    assert cluster.heard() == cluster.watch.pod_deleted(cluster.pod()) == []
    assert (cluster.watch.uid_of(NAME), cluster.watch.uid_of("tiny-w9")) == ("", None)
    assert cluster.signals == {"NodeDeleted": 1}


@pytest.mark.parametrize("forced", [False, True])
def test_a_deleted_pod_was_removed_only_if_that_was_forced(forced: bool) -> None:
    cluster = Cluster()
    if forced:
        cluster.watch.removal_forced(NAME)
    (lost,) = cluster.watch.pod_deleted(cluster.pod())
    assert isinstance(lost, WorkerLost)
    assert lost.removed == forced


@pytest.mark.parametrize("joined", [False, True])
def test_who_ends_before_it_has_joined_has_not_started(joined: bool) -> None:
    cluster = Cluster()
    if joined:
        cluster.watch.joined.add(NAME)
    cluster.pod(phase="Failed")
    (lost,) = cluster.heard()
    assert isinstance(lost, WorkerLost)
    assert lost.exit_code == 1
    assert [worker for worker, _ in cluster.watch.take_failed_starts()] == ([] if joined else [NAME])
    assert cluster.watch.take_failed_starts() == []


def test_a_notice_is_told_again_with_the_time_that_is_left() -> None:
    cluster = Cluster()
    cluster.node(ITN)
    cluster.heard()
    assert cluster.watch.open_notice("tiny-w9", NOW) == []
    assert cluster.watch.open_notice(NAME, NOW + 20) == [PreemptionNotice(NAME, 100.0)]
    assert cluster.watch.open_notices(NOW + 500) == [PreemptionNotice(NAME, LEAST_SECONDS)]


def test_a_worker_that_never_joined_is_lost_some_time_after_its_notice() -> None:
    cluster, over = Cluster(), NOW + 120 + NOTICE_EXPIRY_SECONDS
    cluster.node(ITN)
    cluster.heard()
    assert cluster.watch.expired_notices(lambda worker: False, over) == []
    assert cluster.watch.expired_notices(lambda worker: worker == NAME, over + 1) == []
    (lost,) = cluster.watch.expired_notices(lambda worker: False, over + 1)
    assert isinstance(lost, WorkerLost)
    assert cluster.watch.expired_notices(lambda worker: False, over + 1) == []


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
