"""Nodes with several workers, filled by a real scheduler; one of them vanishes with all its workers at once."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bamboo_core.control.digests import add_digests
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.names import LABEL_JOB_UID
from bamboo_operator.manifests.spread import spread
from cluster.client import Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import spot
from operator_jobs import TOLERATE, digest_of_undisturbed, manifest, slowed
from operator_process import Job, Operator, condition, owners

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 200
ROOM = 2  # GPUs of a node, one for each worker
OURS = {"bamboo.dev/test": "pairs"}


def add_nodes(cluster: Cluster, *names: str) -> None:
    """Add nodes with two GPUs each, for two workers, and with the label that this test's workers select."""
    for name in names:
        node = spot(name, "zone-a", gpus=ROOM)
        cluster.add(replace(node, labels={**node.labels, **OURS}))


def nodes_of(job: Job) -> dict[str, str]:
    """Return the node of each scheduled pod, by worker. A lost worker counts while its pod exists."""
    return {name: pod["spec"]["nodeName"] for name, pod in job.pods().items() if pod["spec"].get("nodeName")}


def protected(status: Json) -> tuple[str | None, str | None]:
    found = condition(status, "Protected")
    return found.get("status"), found.get("reason")


def test_a_node_vanishes_with_two_workers_and_every_bit_is_as_if_it_had_not(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    document = manifest("pairs", STEPS, standby=0, spread={"workersPerNode": ROOM})
    document["spec"]["worker"]["template"]["spec"]["nodeSelector"] = OURS
    add_nodes(installed, "pair-a", "pair-b")
    paced, slow = slowed(document, tmp_path)
    job = Job(installed.api, namespace, paced)
    job.step(2)
    status = job.wait(lambda found: protected(found) == ("True", "InStep"))
    assert condition(status, "Protected")["message"].endswith("two workers or more, in step, on two nodes or more")
    nodes, row = nodes_of(job), owners(status)
    assert Counter(nodes.values()) == {"pair-a": 2, "pair-b": 2}
    assert all(nodes[row[stage - 1]] != nodes[worker] for stage, worker in enumerate(row)), "neighbours share a node"

    installed.fail("pair-b")
    installed.delete("pair-b")
    gone = {worker for worker in row if nodes[worker] == "pair-b"}
    status = job.wait(lambda found: not gone & set(owners(found)) and found["takeovers"] >= 2)
    job.step(status["training"]["step"] + 2)
    # Each of the two that are left holds all stages, but on one node
    status = job.wait(lambda found: protected(found) == ("False", "OneNode"))
    assert condition(status, "Protected")["message"].startswith("4 of 4 stages held on one node only: ")
    assert {nodes_of(job)[worker] for worker in owners(status)} == {"pair-a"}

    add_nodes(installed, "pair-c")
    status = job.wait(lambda found: protected(found) == ("True", "InStep") and found["state"] == "Running")
    nodes, row = nodes_of(job), owners(status)
    assert Counter(nodes[worker] for worker in row) == {"pair-a": 2, "pair-c": 2}
    assert all(nodes[row[stage - 1]] != nodes[worker] for stage, worker in enumerate(row)), "neighbours share a node"
    assert job.status()["training"]["step"] < STEPS - 2, "the job has ended before it was healed"
    slow.unlink()
    status = job.until("Complete")
    assert status["restores"] == 0
    assert add_digests(status["digests"]) == digest_of_undisturbed(document)


def unplaced(pods: Json) -> list[str]:
    """Return the names of the pods that the scheduler could not place."""
    found = []
    for pod in pods["items"]:
        conditions = pod["status"].get("conditions") or ()
        if any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions):
            found.append(pod["metadata"]["name"])
    return found


@pytest.mark.parametrize("empty", [True, False])
def test_the_scheduler_puts_no_more_pods_on_a_node_than_it_has_room_for(
    installed: Cluster, namespace: str, *, empty: bool
) -> None:
    """Of five pods, two nodes get two each, and one stays pending. empty: add a third node, whose taint keeps pods
    away; without it, minDomains has to enforce the limit of two pods per node.
    """
    if not empty and installed.minor < OLDEST_SUPPORTED:
        pytest.skip("the scheduler is older than what Bamboo supports, and does not know minDomains")
    first, second, third = (f"{'three' if empty else 'two'}-{letter}" for letter in "abc")
    ours = {"bamboo.dev/test": first}
    for name in (first, second, *([third] if empty else [])):
        node = spot(name, "zone-a")
        installed.add(replace(node, labels={**node.labels, **ours}))
    if empty:
        installed.taint(third, "test.dev/going", effect="NoSchedule")
    asked = spread(parse_manifest(manifest("room", 1, spread={"workersPerNode": ROOM})), namespace, 0)
    container = {"name": "trainer", "image": "x", "command": ["sleep", "1000"]}
    for number in range(2 * ROOM + 1):
        spec = {"tolerations": TOLERATE, "nodeSelector": ours, "containers": [container], **asked}
        metadata = {"name": f"room-{number}", "labels": {LABEL_JOB_UID: namespace}}
        installed.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, namespace)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    found = installed.api.wait(
        pods,
        lambda found: (
            len(unplaced(found)) == 1 and sum("nodeName" in pod["spec"] for pod in found["items"]) == 2 * ROOM
        ),
    )
    placed = Counter(pod["spec"].get("nodeName") for pod in found["items"])
    assert placed == {first: ROOM, second: ROOM, None: 1}
