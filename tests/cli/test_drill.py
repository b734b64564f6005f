"""Taints of nodes in a drill."""

from typing import Any

import pytest

from bamboo.remote import drill, victims
from bamboo.remote.session import Session
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_operator.signals.signals import SignalKind, node_signal
from remote_kit import NOW, Json, node


@pytest.mark.parametrize(
    ("labels", "key"),
    [
        ({}, "aws-node-termination-handler/spot-itn"),
        ({"karpenter.sh/capacity-type": "spot"}, "aws-node-termination-handler/spot-itn"),
        ({"cloud.google.com/gke-spot": "true"}, "cloud.google.com/impending-node-termination"),
        ({"kubernetes.azure.com/scalesetpriority": "spot"}, "cloudprovider.azure.microsoft.com/draining"),
    ],
)
def test_a_nodes_taint_is_its_clouds_and_the_operator_knows_it(labels: Any, key: str) -> None:
    found = node("node-1", {"key": "other", "effect": "NoSchedule"}, **labels)
    assert victims.taint_key(found) == key
    tainted = victims.with_taint(found, key)
    assert [t["key"] for t in tainted] == ["other", key]
    signal = node_signal({**found, "spec": {"taints": tainted}}, NOW)
    assert signal is not None
    assert (signal.kind, signal.seconds > 0) == (SignalKind.NOTICE, True)
    assert victims.without_taint({**found, "spec": {"taints": tainted}}, key) == found["spec"]["taints"]
    assert victims.without_taint(found, key) is None


def test_a_clouds_own_taint_is_left_alone() -> None:
    key = victims.USUAL_TAINT
    taken = node("node-1", {"key": key, "value": "i-123", "effect": "NoSchedule"})
    with pytest.raises(RemoteError, match="has the taint"):
        victims.with_taint(taken, key)
    assert victims.without_taint(taken, key) is None


class BusyNode:
    """The API server's nodes, of which something else writes one between our read and our write, that many times."""

    def __init__(self, conflicts: int) -> None:
        self.conflicts, self.writes = conflicts, 0
        self.taints: list[Json] = []

    async def node(self, name: str) -> Json:
        return {"metadata": {"name": name}, "spec": {"taints": list(self.taints)}}

    async def set_taints(self, node: Json, taints: list[Json]) -> None:
        self.writes += 1
        if self.writes <= self.conflicts:
            self.taints.append({"key": f"other-{self.writes}"})
            raise ApiError(409, "Conflict", "the object has been modified")
        self.taints = taints


async def test_a_node_that_others_write_gets_its_taint_all_the_same() -> None:
    key, api = "test", BusyNode(2)
    session: Any = Session(api, "default", quiet=True)  # type: ignore[arg-type]
    assert await drill.set_taints(session, "n", lambda node: victims.with_taint(node, key))
    assert [taint["key"] for taint in api.taints] == ["other-1", "other-2", "test"]
    assert await drill.set_taints(session, "n", lambda node: victims.without_taint(node, key))
    assert not await drill.set_taints(session, "n", lambda node: victims.without_taint(node, key))
    assert [taint["key"] for taint in api.taints] == ["other-1", "other-2"]
    with pytest.raises(ApiError, match="modified"):
        await drill.set_taints(Session(BusyNode(99), "d"), "n", lambda node: victims.with_taint(node, key))  # type: ignore[arg-type]
