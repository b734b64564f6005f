"""The test cluster itself: pods run, end and vanish as on a real one."""

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

WAIT = "trap 'echo got TERM; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
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


def ended(found: Json) -> Json:
    state: Json = found["status"]["containerStatuses"][0]["state"]["terminated"]
    return state


def ready(node: Json) -> str:
    return str(next(c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"))


def marked(value: str) -> list[int]:
    """The processes that run with the mark in their environment."""
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


def test_a_pod_runs_and_its_exit_code_and_log_are_told(cluster: Cluster, namespace: str) -> None:
    found = run(cluster, namespace, pod("once", "echo out; echo err >&2; exit 3"), "Failed")
    assert (ended(found)["exitCode"], ended(found)["reason"]) == (3, "Error")
    assert cluster.logs(namespace, "once") == "out\nerr\n"
    assert cluster.api.text("GET", path_of(namespace, "once") + "/log", tailLines=1) == "err\n"


def test_the_operator_reads_ends_of_pods_as_on_real_nodes(cluster: Cluster, namespace: str) -> None:
    check_ends(cluster, namespace, EVERYWHERE)
    check_farewell(cluster, namespace)


@pytest.mark.parametrize(
    ("script", "grace", "log"),
    [(WAIT, 20, "ready\ngot TERM\n"), ("trap '' TERM; echo ready; while :; do sleep 0.1; done", 1, "ready\n")],
    ids=["obeys", "refuses"],
)
def test_deletion_asks_then_kills(cluster: Cluster, namespace: str, script: str, grace: int, log: str) -> None:
    run(cluster, namespace, pod("leaving", script, terminationGracePeriodSeconds=grace))
    until(lambda: "ready" in cluster.logs(namespace, "leaving"))
    started = time.monotonic()
    cluster.api.delete(path_of(namespace, "leaving"))
    until(lambda: cluster.api.find(path_of(namespace, "leaving")) is None, 15)  # less than the grace of who obeys
    assert grace > 1 or time.monotonic() - started > 1
    if cluster.folder:
        assert cluster.logs(namespace, "leaving") == log  # a real cluster forgets the logs


def test_a_container_is_restarted_and_probed_and_its_message_is_kept(cluster: Cluster, namespace: str) -> None:
    probe = {"exec": {"command": ["test", "-e", "/bamboo-test/work/up"]}, "periodSeconds": 1}
    container = {
        "readinessProbe": probe,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "workingDir": "/bamboo-test/work",
        "volumeMounts": [{"name": "work", "mountPath": "/bamboo-test/work"}],
    }
    script = "test -e tried || { touch tried; echo no; exit 7; }; sleep 0.5; touch up; sleep 60"
    manifest = pod("again", script, container, restartPolicy="OnFailure", volumes=[{"name": "work", "emptyDir": {}}])
    cluster.api.create(manifest, namespace)

    def is_ready(found: Json) -> bool:
        return any(status["ready"] for status in found["status"].get("containerStatuses", []))

    found = cluster.api.wait(path_of(namespace, "again"), is_ready)
    (status,) = found["status"]["containerStatuses"]
    assert (status["restartCount"], list(status["state"])) == (1, ["running"])
    assert status["lastState"]["terminated"]["exitCode"] == 7
    assert status["lastState"]["terminated"]["message"] == "no\n"


@pytest.mark.parametrize(
    ("container", "reason", "phase"),
    [
        ({"command": ["no-such-program"]}, "StartError", "Failed"),
        ({"envFrom": [{"configMapRef": {"name": "missing"}}]}, "CreateContainerConfigError", "Pending"),
    ],
)
def test_what_cannot_start_says_why(cluster: Cluster, namespace: str, container: Json, reason: str, phase: str) -> None:
    cluster.api.create(pod("wrong", "true", container), namespace)

    def told(found: Json) -> bool:
        states = [s for c in found["status"].get("containerStatuses", []) for s in c["state"].values()]
        return any(state.get("reason") == reason for state in states) and found["status"]["phase"] == phase

    cluster.api.wait(path_of(namespace, "wrong"), told)


def test_a_no_execute_taint_evicts(cluster: Cluster, namespace: str) -> None:
    found = run(cluster, namespace, pod("evicted", WAIT))
    until(lambda: cluster.logs(namespace, "evicted"))
    cluster.taint(found["spec"]["nodeName"], "cloud.google.com/impending-node-termination")
    until(lambda: "got TERM" in cluster.logs(namespace, "evicted"))
    cluster.api.wait(path_of(namespace, "evicted"), lambda found: not found)


def test_a_killed_container_gives_the_reason_it_is_told(cluster: Cluster, namespace: str) -> None:
    run(cluster, namespace, pod("greedy", WAIT))
    cluster.signal(namespace, "greedy", signal.SIGKILL, reason="OOMKilled")
    path = path_of(namespace, "greedy")
    found = cluster.api.wait(path, lambda found: found["status"]["phase"] == "Failed")
    assert (ended(found)["exitCode"], ended(found)["reason"]) == (137, "OOMKilled")


@pytest.mark.slow  # as are the tests whose nodes fail
def test_processes_of_a_failed_node_die_before_the_cluster_notices(cluster: Cluster, namespace: str) -> None:
    """Its processes die at once, the cluster notices later; after its reboot nothing of it is left."""
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


@pytest.mark.slow  # as are the tests whose nodes fail
def test_processes_of_a_partitioned_node_go_on(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """Its processes go on; what happened meanwhile is told when it is back."""
    cluster.add(on_demand("lonely", "zone-d"))
    here, end = {"nodeSelector": {ZONE: "zone-d"}}, tmp_path / "end"
    until_told = f"until test -e {end}; do sleep 0.1; done; exit 4"
    run(cluster, namespace, pod("ending", until_told, **here, tolerations=[{"operator": "Exists"}]))
    run(cluster, namespace, pod("going-on", "while :; do echo tick; sleep 0.1; done", **here))
    cluster.partition("lonely")
    end.touch()
    before = len(cluster.logs(namespace, "going-on"))
    cluster.api.wait("/api/v1/nodes/lonely", lambda node: ready(node) == "Unknown")
    assert len(cluster.logs(namespace, "going-on")) > before + 5 * 20
    assert cluster.api.get(path_of(namespace, "ending"))["status"]["phase"] == "Running"
    cluster.recover("lonely")
    cluster.api.wait("/api/v1/nodes/lonely", lambda node: ready(node) == "True" and "taints" not in node["spec"])
    found = cluster.api.wait(path_of(namespace, "ending"), lambda found: found["status"]["phase"] == "Failed")
    assert ended(found)["exitCode"] == 4


@pytest.mark.slow  # as are the tests whose nodes fail
def test_a_frozen_node_stands_still(cluster: Cluster, namespace: str) -> None:
    found = run(cluster, namespace, pod("ticking", "while :; do echo tick; sleep 0.02; done"))
    cluster.freeze(found["spec"]["nodeName"])
    time.sleep(0.2)
    before = cluster.logs(namespace, "ticking")
    time.sleep(0.3)
    assert cluster.logs(namespace, "ticking") == before
    cluster.recover(found["spec"]["nodeName"])
    until(lambda: len(cluster.logs(namespace, "ticking")) > len(before))


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
    """Whether it is stopped, or the process that started it dies."""
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
