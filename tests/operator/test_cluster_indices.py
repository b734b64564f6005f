"""The cache of pods and nodes: its content, and the listeners that it notifies."""

from typing import Any

from bamboo_operator.cluster.indices import ClusterIndices
from operator_kit import JOB_UID, Heard, render, stored
from opsim_kopf import node_event, pod_event

KEY = ("default", "tiny")


def node(name: str = "n1", uid: str = "n", ready: str = "True", heartbeat: str = "1") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}
    return {"metadata": {"name": name, "uid": uid}, "spec": {}, "status": {"conditions": [condition]}}


def watched() -> tuple[ClusterIndices, Heard]:
    cluster, heard = ClusterIndices(), Heard()
    cluster.add_listener(KEY, heard)
    return cluster, heard


NAME = str(render(number=0)["metadata"]["name"])


def test_only_what_the_operator_looks_at_is_kept() -> None:
    cluster, heard = watched()
    pod_event(cluster, "ADDED", stored(managedFields=["much"]))
    kept = cluster.pods(KEY, JOB_UID)[NAME]
    assert "managedFields" not in kept["metadata"]
    assert set(kept["spec"]) <= {*("nodeName", "schedulingGates", "terminationGracePeriodSeconds", "containers")}
    assert heard.said == [("changed", NAME)]


def test_a_deletion_of_a_pod_that_has_been_replaced_changes_nothing() -> None:
    cluster, heard = watched()
    pod_event(cluster, "ADDED", stored(uid="new"))
    pod_event(cluster, "DELETED", stored(uid="old"))
    assert set(cluster.pods(KEY, JOB_UID)) == {NAME}
    pod_event(cluster, "MODIFIED", stored(uid="old"))
    assert cluster.known_pods().keys() == {"new"}
    pod_event(cluster, "DELETED", stored(uid="new"))
    assert cluster.pods(KEY, JOB_UID) == {}
    assert heard.said == [("changed", NAME), ("deleted", NAME)]


def test_an_answer_to_a_creation_never_brings_a_deleted_pod_back() -> None:
    cluster, heard = watched()
    pod_event(cluster, "DELETED", stored(uid="quick"))
    cluster.pod_created(stored(uid="quick"))
    assert cluster.pods(KEY, JOB_UID) == {}
    assert heard.said == [("deleted", NAME)]
    cluster.pod_created(stored(uid="slow"))
    cluster.pod_created(stored(uid="slow"))
    assert heard.said[1:] == [("changed", NAME)]


def test_who_listens_now_is_not_removed_by_who_listened_before() -> None:
    cluster, before = watched()
    now = Heard()
    cluster.add_listener(KEY, now)
    cluster.remove_listener(KEY, before)
    pod_event(cluster, "ADDED", stored())
    assert (before.said, now.said) == ([], [("changed", NAME)])


def test_pods_of_jobs_of_one_name_are_told_apart() -> None:
    cluster, _ = watched()
    pod_event(cluster, "ADDED", stored())
    assert cluster.belongs_to_another_job(KEY, "another job", "p0")
    assert not cluster.belongs_to_another_job(KEY, JOB_UID, "p0")
    cluster.known_pods()["p0"]()
    assert not cluster.pods(KEY, JOB_UID)


def test_pods_on_a_node_that_was_never_listed_go_with_it() -> None:
    cluster, heard = watched()
    pod_event(cluster, "ADDED", stored(node="n1"))
    known = cluster.known_nodes()
    assert known.keys() == {"n1"}
    known["n1"]()
    assert heard.said[1:] == [("without n1", NAME)]
    node_event(cluster, None, node())
    assert cluster.known_nodes().keys() == {"n", "n1"}
    cluster.known_nodes()["n1"]()
    assert heard.said[2:] == [("changed", NAME)], "there is one of that name"
