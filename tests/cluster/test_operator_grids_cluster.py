"""A job that says no grid, on nodes that come and go: a real scheduler, pods that really train."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.client import Json
from cluster.handle import Cluster
from cluster.nodes import spot
from operator_jobs import claimed, folder_of_the_claim, local_run, manifest, slowed
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 240  # a second each on one worker, while there is something to see
NOTICE = "cloud.google.com/impending-node-termination"


def test_the_grid_follows_the_nodes_and_the_bits_stay_the_same(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    for number, zone in enumerate("abc"):
        installed.add(spot(f"more-{number}", f"zone-{zone}"))
    training = {"steps": STEPS, "globalBatchSize": 48, "microBatchSize": 2}
    worker = {
        "resources": {"limits": {"nvidia.com/gpu": 8}},  # a node each
        "template": manifest("x")["spec"]["worker"]["template"],
    }
    asked = {"topology": {}, "elastic": {"maxWorkers": 6}, "standby": 0, "worker": worker}
    asked["checkpoint"] = {"storage": claimed(installed, namespace), "everySteps": STEPS}
    document, slow = slowed(manifest("follows", training=training, **asked), tmp_path)
    job = Job(installed.api, namespace, document)
    runs_on(job, 6)

    # a machine vanishes, then another gets notice
    lost, noticed = nodes_of(job)[:2]
    installed.fail(lost)
    installed.delete(lost)
    runs_on(job, 5)
    installed.taint(noticed, NOTICE, "", "NoSchedule")
    status = runs_on(job, 4)
    assert status["preemptions"] >= 2
    at = job.status()["training"]["step"]

    # others come in their place
    installed.untaint(noticed, NOTICE)
    installed.add(spot("late", "zone-b"))
    runs_on(job, 6)
    assert job.status()["training"]["step"] > at

    slow.unlink()
    status = job.until("Complete")
    assert status["training"]["step"] == STEPS
    assert job.told("WeightsSaved")
    (kept,) = folder_of_the_claim(installed, namespace).glob("*/weights")
    del document["spec"]["checkpoint"]
    alone, ours = (tensors(folder) for folder in (local_run(document, tmp_path) / "weights", kept))
    assert sorted(ours) == sorted(alone)
    assert not [name for name in alone if not torch.equal(ours[name], alone[name])]
    job.told("Complete")
    assert {"GridChosen", "NoticeReceived", "WorkerLost"} <= {reason for reason, _ in job.events()}


def tensors(weights: Path) -> dict[str, torch.Tensor]:
    """The whole model's, in however many stages it was saved."""
    return {name: tensor for file in sorted(weights.iterdir()) for name, tensor in load_file(file).items()}


def runs_on(job: Job, workers: int) -> Json:
    """Waits until a grid is chosen for so many, and runs, healed, on some or all of them and on nobody else."""

    def settled(status: Json) -> bool:
        plan = json.loads(status.get("plan") or "{}")
        owners = {worker for row in plan.get("pipelines", ()) for worker in row}
        chosen = any(reason == "GridChosen" and f"for {workers} workers" in told for reason, told in job.events())
        return chosen and workers - 1 <= len(owners) <= workers

    return job.wait(settled)


def nodes_of(job: Job) -> list[str]:
    """Of the owners of stages."""
    rows = json.loads(job.status()["plan"])["pipelines"]
    pods = job.pods()
    return [pods[worker]["spec"]["nodeName"] for row in rows for worker in row]
