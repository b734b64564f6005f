"""Bamboo as it was installed on a real cluster, for example by `make kind`: a job trains there, in its images.

BAMBOO_INSTALLED=1 says that an operator runs there, and KUBECONFIG names the cluster.
"""

import os
from typing import Any

import pytest

from cluster.client import Json
from cluster.handle import Cluster
from manifest_kit import bamboojob, training
from operator_jobs import TOLERATE
from operator_process import Job

pytest_plugins = ["cluster_kit"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("BAMBOO_INSTALLED"), reason="BAMBOO_INSTALLED does not say that Bamboo is installed"
    ),
]
SECONDS = 300  # for nodes that pull an image, and share a machine


def manifest(name: str, **spec: Any) -> Json:
    usual = {
        "task": {"entrypoint": "bamboo_trainer.models.mlp:build", "config": {"width": 64, "blocks": 6}},
        "training": training(600, 256, 32),
        "topology": {"stages": 2},
        "worker": {
            "resources": {"requests": {"cpu": "100m", "memory": "400Mi"}},
            "template": {"spec": {"tolerations": TOLERATE}},
        },
    }
    return bamboojob(name, **(usual | spec))


def restrict(cluster: Cluster, namespace: str) -> None:
    """No pod comes in that does not keep to the restricted Pod Security Standard."""
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})


def test_a_job_loses_a_worker_and_no_bit(cluster: Cluster, namespace: str) -> None:
    restrict(cluster, namespace)
    disturbed = Job(cluster.api, namespace, manifest("disturbed", standby={"workers": 1}))
    disturbed.step(20, SECONDS)
    victim = sorted(disturbed.pods())[0]
    cluster.api.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{victim}", {"gracePeriodSeconds": 0})
    disturbed.wait(lambda status: status["preemptions"] > 0, SECONDS)
    lost = disturbed.until("Complete", seconds=SECONDS)
    assert lost["training"]["step"] == 600

    calm = Job(cluster.api, namespace, manifest("calm")).until("Complete", seconds=SECONDS)
    assert calm["preemptions"] == 0
    assert lost["digests"] == calm["digests"]


def test_a_mistake_is_said_and_a_job_leaves_nothing(cluster: Cluster, namespace: str) -> None:
    restrict(cluster, namespace)
    wrong = {"entrypoint": "bamboo_trainer.models.mlp:build", "config": {"width": -1}}
    job = Job(cluster.api, namespace, manifest("wrong", task=wrong))
    status = job.until("Failed", seconds=SECONDS)
    assert "width" in next(c["message"] for c in status["conditions"] if c["type"] == "Failed")
    job.delete()
    job.until_gone(SECONDS)
