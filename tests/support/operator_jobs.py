"""Small jobs for the operator's tests, and what becomes of them if nothing happens."""

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
    """A volume claim of that namespace, made now, as a checkpoint's storage."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.api.create(claim, namespace)
    return "pvc://kept"


def folder_of_the_claim(cluster: Cluster, namespace: str) -> Path:
    """The folder on this machine with the files of the claim that `claimed` made."""
    volume = cluster.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/kept")["spec"]["volumeName"]
    return Path(cluster.api.get(f"/api/v1/persistentvolumes/{volume}")["spec"]["hostPath"]["path"])


def digest_of_undisturbed(document: Json) -> str:
    """The digest of all the job's layers, however they are split, if nothing happens to it."""
    return add_digests(undisturbed(document).digests)


def undisturbed(document: Json) -> TrainingJob:
    """Trains the job in this process, on one worker with all layers: the grid changes no bit."""
    spec = document["spec"]
    alone = bamboojob("alone", task=spec["task"], training=spec["training"], topology={"stages": 1})
    return TrainingJob(alone).run()


def small(name: str, steps: int | None = None, standby: int = 0, gpus: int = 1, **spec: Any) -> Json:
    """A job of two stages: it starts as fast as a job can. Without a number of steps it is endless."""
    found = manifest(name, steps or ENDLESS, standby, **{"topology": {"stages": 2}, **spec})
    if gpus != 1:
        found["spec"]["worker"]["resources"]["limits"]["nvidia.com/gpu"] = gpus
    return found if steps else endless(found)


def endless(document: Json) -> Json:
    """A job that no test sees end; its workers run on this machine.

    It trains slowly, some steps a second: at full speed it would take the processors from whatever the test waits for.
    """
    document["spec"]["training"]["steps"] = ENDLESS
    document = paced.slowed(document, Path(TEXT))  # which stays
    document["spec"]["worker"]["template"]["spec"]["containers"] = [dict(PACED)]
    return document


def wrapped(document: Json, command: list[str]) -> Json:
    """The job with workers that run that command."""
    document["spec"]["worker"]["template"]["spec"]["containers"] = [{"name": "trainer", "command": command}]
    return document


def slowed(document: Json, folder: Path, seconds: float = 1.0) -> tuple[Json, Path]:
    """The job slowed, and a file: a step takes so many seconds until that goes. Its workers run on this machine."""
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
