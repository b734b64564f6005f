"""Small jobs for the operator's tests, and their undisturbed results."""

from pathlib import Path
from typing import Any

import paced
from bamboo_core.control.digests import add_digests
from cluster.client import Json
from cluster.handle import Cluster
from folders import TASK_PATH
from manifest_kit import TEXT, bamboojob, gpt_task, training
from training_job import Job as TrainingJob

ENDLESS = 100_000  # steps
PACED: Json = {"name": "trainer", "env": [{"name": "PYTHONPATH", "value": TASK_PATH}]}
TOLERATE = [{"key": "bamboo.dev/spot", "operator": "Exists"}]


def manifest(name: str, steps: int = 400, standby: int = 1, **spec: Any) -> Json:
    usual = {
        "task": gpt_task(),
        "training": training(steps, 16, 2),
        "topology": {"stages": 4},
        "standby": {"workers": standby},
        "nodePools": [{"name": "spot", "preset": "Karpenter", "pricePerHour": "0.90"}],
        "worker": {
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "template": {"spec": {"tolerations": TOLERATE}},
        },
    }
    return bamboojob(name, **(usual | spec))


def claimed(cluster: Cluster, namespace: str) -> str:
    """Create a volume claim in the namespace, and return its storage URL for checkpoints."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.api.create(claim, namespace)
    return "pvc://kept"


def folder_of_the_claim(cluster: Cluster, namespace: str) -> Path:
    """Return the folder on this machine that holds the volume of the claim that `claimed` has created."""
    volume = cluster.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/kept")["spec"]["volumeName"]
    return Path(cluster.api.get(f"/api/v1/persistentvolumes/{volume}")["spec"]["hostPath"]["path"])


def digest_of_undisturbed(document: Json) -> str:
    """Return the digest of all layers after undisturbed training, the same for any split."""
    return add_digests(undisturbed(document).digests)


def undisturbed(document: Json) -> TrainingJob:
    """Train the job on one worker in this process, and return the ended job; any grid gives the same bits."""
    spec = document["spec"]
    alone = bamboojob("alone", task=spec["task"], training=spec["training"], topology={"stages": 1})
    return TrainingJob(alone).run()


def small(name: str, steps: int | None = None, standby: int = 0, gpus: int = 1, **spec: Any) -> Json:
    """Return a job of two stages, which starts fast. steps: None for an endless job. gpus: GPUs of each worker."""
    found = manifest(name, steps or ENDLESS, standby, **{"topology": {"stages": 2}, **spec})
    if gpus != 1:
        found["spec"]["worker"]["resources"]["limits"]["nvidia.com/gpu"] = gpus
    return found if steps else endless(found)


def endless(document: Json) -> Json:
    """Return the job with ENDLESS slow steps. At full speed, the job would slow down the rest of the test.

    Its workers must run on this machine, since they import this checkout's modules.
    """
    document["spec"]["training"]["steps"] = ENDLESS
    document = paced.slowed(document, Path(TEXT))  # this file always exists, so the job stays slow
    document["spec"]["worker"]["template"]["spec"]["containers"] = [dict(PACED)]
    return document


def wrapped(document: Json, command: list[str]) -> Json:
    """Return the job with workers that run this command."""
    document["spec"]["worker"]["template"]["spec"]["containers"] = [{"name": "trainer", "command": command}]
    return document


def slowed(document: Json, folder: Path, seconds: float = 1.0) -> tuple[Json, Path]:
    """Return the job with steps of about `seconds` each, and the file whose removal ends the delays.

    Its workers must run on this machine, since they need that file and this checkout's modules.
    """
    mark = folder / "pace" / "slow"
    mark.parent.mkdir()
    mark.touch()
    training = document["spec"]["training"]
    microbatches = training["globalBatchSize"] // training["microBatchSize"]
    document = paced.slowed(document, Path("/pace", mark.name), seconds=seconds / microbatches)
    template = document["spec"]["worker"]["template"]
    template["spec"]["volumes"] = [{"name": "pace", "hostPath": {"path": str(mark.parent), "type": "Directory"}}]
    template["spec"]["containers"] = [{**PACED, "volumeMounts": [{"name": "pace", "mountPath": "/pace"}]}]
    return document, mark
