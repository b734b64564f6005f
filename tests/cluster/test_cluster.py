"""The test cluster itself: its pods run, end and vanish as on a real one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.children import is_alive, marked
from cluster.client import Json
from cluster.handle import Cluster
from folders import SUPPORT
from pod_ends_kit import EVERYWHERE, check_ends, check_farewell
from waiting import until

pytest_plugins = ["cluster_kit"]
pytestmark = pytest.mark.cluster

MARK = "BAMBOO_TEST_MARK"
SECONDS = 120


def run_marked(cluster: Cluster, mark: str) -> Json:
    """Start a pod with a daemon and a shell that ignores SIGTERM, with `mark` in their environment. Return the pod."""
    script = "setsid sleep 300 & trap '' TERM; sleep 300; sleep 300"
    env = [{"name": MARK, "value": mark}]
    container = {"name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script], "env": env}
    spec = {"restartPolicy": "Never", "containers": [container]}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "daemon"}, "spec": spec}, "default")
    return cluster.api.wait("/api/v1/namespaces/default/pods/daemon", lambda pod: pod["status"]["phase"] == "Running")


def test_the_operator_reads_ends_of_pods_as_on_real_nodes(cluster: Cluster, namespace: str) -> None:
    check_ends(cluster, namespace, EVERYWHERE)
    check_farewell(cluster, namespace)


OWNER = """
import sys, time
from cluster.handle import Cluster
from cluster.nodes import on_demand
import test_cluster
cluster = Cluster.start(nodes=[on_demand("only", "zone-a")])
test_cluster.run_marked(cluster, sys.argv[1])
print(cluster.folder, *cluster.status()["processes"].values(), flush=True)
if sys.argv[2] == "stop":
    cluster.stop()
else:
    time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "SIGKILL"])
@pytest.mark.skipif("KUBECONFIG" in os.environ, reason="about the test cluster only")
def test_nothing_remains(cluster: Cluster, end: str, tmp_path: Path) -> None:
    """Nothing of the cluster remains after it is stopped, or after the process that started it dies."""
    mark = f"{end}-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, mark, end],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
    ) as owner:
        try:
            assert owner.stdout is not None
            folder, *pids = owner.stdout.readline().split()
            assert len(pids) == 5
            if end != "stop":
                until(lambda: len(marked(f"{MARK}={mark}")) >= 3, SECONDS)
                owner.send_signal(signal.Signals[end])
            owner.wait(60)
        finally:
            owner.kill()
    until(lambda: not Path(folder).exists() and not any(is_alive(int(pid)) for pid in pids), SECONDS)
    assert not marked(f"{MARK}={mark}")
