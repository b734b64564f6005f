"""The test cluster itself: its pods run, end and vanish as on a real one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.children import is_alive
from cluster.client import Json
from cluster.handle import Cluster
from cluster.nodes import ZONE, on_demand
from folders import SUPPORT
from pod_ends_kit import EVERYWHERE, check_ends, check_farewell

pytest_plugins = ["cluster_kit"]
pytestmark = pytest.mark.cluster

MARK = "BAMBOO_TEST_MARK"


def pod(name: str, script: str, container: Mapping[str, Any] | None = None, **spec: Any) -> Json:
    main = {"name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script], **(container or {})}
    usual = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [main], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": usual}


def run(cluster: Cluster, namespace: str, manifest: Json, phase: str = "Running", seconds: float = 40) -> Json:
    cluster.api.create(manifest, namespace)
    path = path_of(namespace, manifest["metadata"]["name"])
    return cluster.api.wait(path, lambda found: found["status"].get("phase") == phase, seconds)


def path_of(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def ready(node: Json) -> str:
    return str(next(c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"))


def marked(value: str) -> list[int]:
    """Return the processes that have the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={value}".encode() in variables:
            found.append(int(folder.name))
    return found


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def test_the_operator_reads_ends_of_pods_as_on_real_nodes(cluster: Cluster, namespace: str) -> None:
    check_ends(cluster, namespace, EVERYWHERE)
    check_farewell(cluster, namespace)


def test_a_container_is_restarted_and_its_message_is_kept(cluster: Cluster, namespace: str) -> None:
    container = {
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "workingDir": "/bamboo-test/work",
        "volumeMounts": [{"name": "work", "mountPath": "/bamboo-test/work"}],
    }
    script = "test -e tried || { touch tried; echo no; exit 7; }; sleep 60"
    manifest = pod("again", script, container, restartPolicy="OnFailure", volumes=[{"name": "work", "emptyDir": {}}])
    cluster.api.create(manifest, namespace)

    def runs_again(found: Json) -> bool:
        statuses = found["status"].get("containerStatuses", [])
        return any(status["restartCount"] == 1 and "running" in status["state"] for status in statuses)

    (status,) = cluster.api.wait(path_of(namespace, "again"), runs_again)["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["exitCode"] == 7
    assert status["lastState"]["terminated"]["message"] == "no\n"


@pytest.mark.slow  # as are the tests whose nodes fail
def test_processes_of_a_failed_node_die_before_the_cluster_notices(cluster: Cluster, namespace: str) -> None:
    """The processes die at once, the cluster notices later, and after a reboot nothing of the node's pods is left."""
    cluster.add(on_demand("doomed", "zone-d"))
    here = {"nodeSelector": {ZONE: "zone-d"}}
    env = {"env": [{"name": MARK, "value": namespace}]}
    for name in ("one", "two"):
        run(cluster, namespace, pod(name, "sleep 300 & sleep 300", env, **here))
    until(lambda: len(marked(namespace)) >= 4)
    cluster.fail("doomed")
    until(lambda: not marked(namespace), 3)  # long before the cluster notices
    node = "/api/v1/nodes/doomed"
    assert ready(cluster.api.get(node)) == "True"
    cluster.api.wait(node, lambda node: ready(node) == "Unknown")
    cluster.api.wait(path_of(namespace, "one"), lambda found: "deletionTimestamp" in found["metadata"])
    cluster.recover("doomed")
    cluster.api.wait(node, lambda node: ready(node) == "True")
    cluster.api.wait(path_of(namespace, "one"), lambda found: not found)
    cluster.delete("doomed")
    assert cluster.api.find(node) is None


OWNER = f"""
import sys, time
from cluster.handle import Cluster
from cluster.nodes import on_demand
import test_cluster
cluster = Cluster.start(nodes=[on_demand("only", "zone-a")], report=lambda line: None)
env = {{"env": [{{"name": "{MARK}", "value": sys.argv[1]}}]}}
manifest = test_cluster.pod("daemon", "setsid sleep 300 & trap '' TERM; sleep 300; sleep 300", env)
test_cluster.run(cluster, "default", manifest)
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
    """The cluster is stopped, or the process that started it dies."""
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
                until(lambda: len(marked(mark)) >= 3)
                owner.send_signal(signal.Signals[end])
            owner.wait(60)
        finally:
            owner.kill()
    until(lambda: not Path(folder).exists() and not any(is_alive(int(pid)) for pid in pids))
    assert not marked(mark)
