"""Pods on real nodes: how they end, and the user that they run as. test_installed.py tests the failure of a node."""

from collections.abc import Iterator

import pytest

from cluster import build, image_archive
from cluster.handle import Cluster
from cluster.nodes import NodeSpec
from operator_kit import render
from pod_ends_kit import EVERYWHERE, ON_REAL_NODES, check_ends, check_farewell, path

pytest_plugins = ["cluster_kit"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE = "busybox:1.36"
LOOK = "id -u; touch /x 2>&1; grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with one real node that has the image busybox:1.36. Skip the tests if it cannot be built."""
    archive = tmp_path_factory.mktemp("images") / "busybox.tar"
    try:
        busybox = build.node_programs().root / "bin/busybox"
        image_archive.write(archive, [f"docker.io/library/{IMAGE}"], busybox)
        started = Cluster.start_real(nodes=[NodeSpec(name="real-a")], archives=[archive])
    except build.Unavailable as error:
        pytest.skip(str(error))
    try:
        yield started
    finally:
        started.stop()


def test_the_operator_reads_how_pods_end(cluster: Cluster, namespace: str) -> None:
    check_ends(cluster, namespace, EVERYWHERE + ON_REAL_NODES)
    check_farewell(cluster, namespace)


def test_a_pod_runs_as_the_user_that_workers_have(cluster: Cluster, namespace: str) -> None:
    """A pod with the workers' security context runs as user 65532, with a read-only root folder and no capabilities."""
    workers = render()["spec"]
    context = workers["containers"][0]["securityContext"]
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", LOOK], "securityContext": context}
    spec = {"restartPolicy": "Never", "securityContext": workers["securityContext"], "containers": [container]}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, "spec": spec}, namespace)
    ended = ("Succeeded", "Failed")
    cluster.api.wait(path(namespace, "worker"), lambda found: found and found["status"].get("phase") in ended)
    said = cluster.logs(namespace, "worker").split()
    assert said[0] == "65532"
    assert "Read-only" in said
    assert said[-6:] == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1", "Seccomp:", "2"]
