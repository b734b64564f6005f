"""Bamboo as installed on real nodes: jobs train in Bamboo's images.

BAMBOO_INSTALLED=1 means that an operator runs on the cluster of KUBECONFIG, for example by `make kind`. Otherwise
the tests build the operator's and the workers' image, and install the chart on a test cluster with real nodes.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helm_kit
import image_kit
import paced
from chart_release import Release
from cluster import build
from cluster.client import Json
from cluster.handle import Cluster
from cluster.nodes import NodeSpec
from manifest_kit import bamboojob, training
from operator_jobs import TOLERATE
from operator_process import Job, condition

INSTALLED = bool(os.environ.get("BAMBOO_INSTALLED"))
pytest_plugins = ["cluster_kit"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900 if INSTALLED else 3600),
    *([] if INSTALLED else [pytest.mark.image, pytest.mark.slow]),
]
SYSTEM = "bamboo-system"
SECONDS = 300  # for nodes that pull an image, and share a machine
PACE, MARK = "pace", "slow"  # a ConfigMap and one of its keys


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if INSTALLED:
        yield Cluster.attach(Path(os.environ["KUBECONFIG"].split(os.pathsep)[0]))
        return
    folder = tmp_path_factory.mktemp("installed")
    try:
        helm_kit.helm()
        built = image_kit.images()
        archives = image_kit.archived(built, folder)
        started = Cluster.start_real(nodes=[NodeSpec(name=f"real-{letter}") for letter in "abc"], archives=archives)
    except (helm_kit.Missing, image_kit.Unavailable, build.Unavailable) as missing:
        pytest.skip(str(missing))
    try:
        Release(
            started, SYSTEM, folder, values={"image": of(built.operator), "workers": {"image": of(built.trainer)}}
        ).install()
        yield started
    finally:
        started.stop()


def of(image: str) -> Json:
    """Return an image's repository and tag, as the chart's values name them."""
    repository, _, tag = image.rpartition(":")
    return {"repository": repository, "tag": tag}


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


def slowed(cluster: Cluster, namespace: str, name: str, **spec: Any) -> Json:
    """Create a ConfigMap with the task `paced` and its mark, and return a manifest whose steps take at least a second
    while the mark exists, so that the job outlasts its losses.

    The ConfigMap holds both, since nodes share no folder with the test, and images lack the tests' modules.
    """
    data = {"paced.py": Path(paced.__file__).read_text(), MARK: ""}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PACE}, "data": data}
    cluster.api.create(found, namespace)
    document = paced.slowed(manifest(name, **spec), Path("/pace", MARK), seconds=32 / 256)
    template = document["spec"]["worker"]["template"]["spec"]
    template["volumes"] = [{"name": PACE, "configMap": {"name": PACE}}]
    environment = [{"name": "PYTHONPATH", "value": "/pace"}]
    mount = {"name": PACE, "mountPath": "/pace"}
    template["containers"] = [{"name": "trainer", "env": environment, "volumeMounts": [mount]}]
    return document


def at_full_speed(cluster: Cluster, namespace: str) -> None:
    """Remove the mark. The kubelets see that within two minutes; then steps are no longer delayed."""
    cluster.api.patch(f"/api/v1/namespaces/{namespace}/configmaps/{PACE}", {"data": {MARK: None}})


def restrict(cluster: Cluster, namespace: str) -> None:
    """Admit only pods that keep to the restricted Pod Security Standard."""
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})


def test_a_job_loses_a_worker_and_a_node_and_no_bit(cluster: Cluster, namespace: str) -> None:
    """The job loses a pod, then a node (another pod if INSTALLED), and ends with the digests of an undisturbed job."""
    restrict(cluster, namespace)
    disturbed = Job(cluster.api, namespace, slowed(cluster, namespace, "disturbed", standby={"workers": 1}))
    disturbed.step(5, SECONDS)
    lose_pod(cluster, disturbed)
    step = disturbed.wait(whole_after_losses(1), SECONDS)["training"]["step"]
    disturbed.step(step + 5, SECONDS)
    if INSTALLED:
        lose_pod(cluster, disturbed)
    else:
        cluster.fail(node_to_lose(cluster, disturbed))
    disturbed.wait(lambda status: status["preemptions"] > 1, SECONDS)
    at_full_speed(cluster, namespace)
    lost = disturbed.until("Complete", seconds=SECONDS)
    assert lost["training"]["step"] == 600

    calm = Job(cluster.api, namespace, manifest("calm")).until("Complete", seconds=SECONDS)
    assert calm["preemptions"] == 0
    assert lost["digests"] == calm["digests"]


def lose_pod(cluster: Cluster, job: Job) -> None:
    victim = sorted(job.pods())[0]
    cluster.api.request("DELETE", f"/api/v1/namespaces/{job.namespace}/pods/{victim}", {"gracePeriodSeconds": 0})


def whole_after_losses(count: int) -> Callable[[Json], bool]:
    """Return a test of a job's status: at least `count` workers were lost, and each stage has a second copy again."""
    return lambda status: status["preemptions"] >= count and condition(status, "Protected").get("status") == "True"


def node_to_lose(cluster: Cluster, job: Job) -> str:
    """Return the name of the node with the fewest workers, but at least one, and without the operator."""
    workers = [pod["spec"]["nodeName"] for pod in job.pods().values()]
    pods = cluster.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
    spared = {pod["spec"]["nodeName"] for pod in pods}
    return min(set(workers) - spared, key=lambda node: (workers.count(node), node))


def test_a_mistake_is_said_and_a_job_leaves_nothing(cluster: Cluster, namespace: str) -> None:
    restrict(cluster, namespace)
    wrong = {"entrypoint": "bamboo_trainer.models.mlp:build", "config": {"width": -1}}
    job = Job(cluster.api, namespace, manifest("wrong", task=wrong))
    status = job.until("Failed", seconds=SECONDS)
    assert "width" in next(c["message"] for c in status["conditions"] if c["type"] == "Failed")
    job.delete()
    job.until_gone(SECONDS)
