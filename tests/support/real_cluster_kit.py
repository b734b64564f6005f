"""For tests with real nodes, whose pods are containers: a cluster of two, pods for it, and kubectl.

A module whose `cluster` is such a one has a fixture of that name: see tests/cluster/test_real_nodes.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster import build, image_archive
from cluster.client import Json
from cluster.handle import Cluster
from cluster.nodes import GPU, ZONE, NodeSpec

KUBECTL = Path(sys.executable).parent / "kubectl"
IMAGE = "busybox:1.36"
# Labels and GPUs are what a cloud and a device plugin give to a node; a kubelet alone has neither.
NODES = [NodeSpec(name=f"real-{letter}", labels={ZONE: f"zone-{letter}"}, capacity={GPU: "2"}) for letter in ("a", "b")]


def start(folder: Path, archives: tuple[Path, ...] = ()) -> Cluster:
    """Two real nodes, to which the image busybox:1.36 is known. Without real nodes the test is skipped.

    folder: for the image's archive. archives: of more images.
    """
    try:
        node = build.node_programs()
        archive = image_archive.write(folder / "busybox.tar", [f"docker.io/library/{IMAGE}"], node.root / "bin/busybox")
        return Cluster.start_real(nodes=NODES, archives=[archive, *archives])
    except build.Unavailable as error:
        pytest.skip(str(error))


def pod(name: str, script: str, *, node: str | None = None, grace: int = 2, **container: object) -> Json:
    """A pod that runs a script of sh. container: more fields of its only container."""
    spec = {
        "terminationGracePeriodSeconds": grace,
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", script], **container}],
        **({"nodeName": node} if node else {}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def kubectl(
    cluster: Cluster, namespace: str, *arguments: str, seconds: float = 60
) -> "subprocess.CompletedProcess[str]":
    """As it ended; nothing is expected of that."""
    command = [str(KUBECTL), "--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
