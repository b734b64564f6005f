"""Nodes with several workers, as a real scheduler fills them: one of them vanishes with all its workers at once."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.client import Json
from cluster.handle import Cluster
from cluster.nodes import spot
from operator_jobs import digests_of_a_local_run, manifest, slowed
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 200
ROOM = 2  # GPUs of a node, one for each worker
OURS = {"bamboo.dev/test": "pairs"}


def add_nodes(cluster: Cluster, *names: str) -> None:
    """Each with room for two workers of this test, and for nobody else."""
    for name in names:
        node = spot(name, "zone-a", gpus=ROOM)
        cluster.add(replace(node, labels={**node.labels, **OURS}))


def nodes_of(job: Job) -> dict[str, str]:
    """By worker; of a lost one, too, while its pod is there."""
    return {name: pod["spec"]["nodeName"] for name, pod in job.pods().items() if pod["spec"].get("nodeName")}


def owners(status: Json) -> list[str]:
    """Of the only pipeline's stages."""
    row: list[str] = json.loads(status["plan"])["pipelines"][0]
    return row


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
    assert status["repeatedSteps"] == 0
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)
