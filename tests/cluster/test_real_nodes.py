"""Pods on real nodes: containers, signals, probes, networks, and the loss of power and contact."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import build, cgroups, image_archive
from cluster.client import Json
from cluster.handle import Cluster
from cluster.nodes import GPU, ZONE, NodeSpec
from operator_kit import render
from pod_ends_kit import EVERYWHERE, ON_REAL_NODES, check_ends, check_farewell
from waiting import until

pytest_plugins = ["cluster_kit"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"
ENDED_SECONDS = 60
IMAGE = "busybox:1.36"
# Labels and GPUs are what a cloud and a device plugin give to a node; a kubelet alone has neither.
NODES = [NodeSpec(name=f"real-{letter}", labels={ZONE: f"zone-{letter}"}, capacity={GPU: "2"}) for letter in ("a", "b")]


def start(folder: Path) -> Cluster:
    """Start two real nodes with the image busybox:1.36, or skip the test.

    folder: for the image's archive.
    """
    try:
        node = build.node_programs()
        archive = image_archive.write(folder / "busybox.tar", [f"docker.io/library/{IMAGE}"], node.root / "bin/busybox")
        return Cluster.start_real(nodes=NODES, archives=[archive])
    except build.Unavailable as error:
        pytest.skip(str(error))


def pod(name: str, script: str, *, node: str | None = None, grace: int = 2, **container: object) -> Json:
    """Return a pod that runs a script of sh. container: further fields of its only container."""
    spec = {
        "terminationGracePeriodSeconds": grace,
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", script], **container}],
        **({"nodeName": node} if node else {}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = start(tmp_path_factory.mktemp("images"))
    try:
        yield started
    finally:
        started.stop()


def create(cluster: Cluster, namespace: str, manifest: Json) -> str:
    """Create a pod and return its path."""
    cluster.api.create(manifest, namespace)
    return f"/api/v1/namespaces/{namespace}/pods/{manifest['metadata']['name']}"


def running(cluster: Cluster, path: str) -> Json:
    return cluster.api.wait(path, lambda found: found and found["status"].get("phase") == "Running")


def condition(found: Json, kind: str) -> str | None:
    conditions = found.get("status", {}).get("conditions", ())
    return next((each["status"] for each in conditions if each["type"] == kind), None)


def test_the_operator_reads_how_pods_end(cluster: Cluster, namespace: str) -> None:
    check_ends(cluster, namespace, EVERYWHERE + ON_REAL_NODES)
    check_farewell(cluster, namespace)


def test_a_pod_runs_as_the_user_that_workers_have(cluster: Cluster, namespace: str) -> None:
    """The security context is the operator's for workers; busybox is an image of root's."""
    (given,) = render()["spec"]["containers"]
    restricted = {"securityContext": given["securityContext"]}
    script = "id -u; touch /x 2>&1; grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status"
    manifest = pod("worker", script, **restricted)
    manifest["spec"]["securityContext"] = render()["spec"]["securityContext"]
    path = create(cluster, namespace, manifest)
    cluster.api.wait(path, lambda found: found and found["status"].get("phase") in ("Succeeded", "Failed"))
    said = cluster.logs(namespace, "worker").split()
    assert said[0] == "65532"
    assert "Read-only" in said
    assert said[-6:] == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1", "Seccomp:", "2"]

    manifest = pod("root", "id -u", securityContext={"runAsNonRoot": True})
    path = create(cluster, namespace, manifest)
    found = cluster.api.wait(path, lambda found: waiting(found).get("reason") == "CreateContainerConfigError")
    assert "root" in waiting(found)["message"]


def waiting(found: Json) -> Json:
    """Return why the pod's container has not started."""
    statuses = found.get("status", {}).get("containerStatuses", ())
    return next((each["state"].get("waiting") or {} for each in statuses), {})


def test_a_power_cut_takes_a_node_with_its_pods_and_another_takes_its_place(cluster: Cluster, namespace: str) -> None:
    path = create(cluster, namespace, pod("victim", COUNT, node="real-b"))
    running(cluster, path)
    cluster.fail("real-b")
    assert not [*cgroups.HIERARCHIES.glob("*/bamboo-*-2")]
    cluster.api.wait("/api/v1/nodes/real-b", lambda found: condition(found, "Ready") == "Unknown", 60)
    cluster.api.wait(path, lambda found: "deletionTimestamp" in found["metadata"], 60)
    cluster.restore()
    running(cluster, create(cluster, namespace, pod("next", "sleep 600", node="real-b")))


@pytest.mark.parametrize("killed", ["starter", "host"])
def test_nothing_outlives_a_cluster_that_is_killed(killed: str, cluster: Cluster, tmp_path: Path) -> None:
    """No process, mount, interface, cgroup or file is left. The cluster of the other tests goes on beside it."""
    del cluster
    folder = tmp_path / "cluster"
    folder.mkdir()
    before = traces(folder)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from cluster.handle import Cluster; from cluster.nodes import NodeSpec\n"
        "found = Cluster.start_real(nodes=[NodeSpec(name='lost')], folder=Path(sys.argv[1]))\n"
        "print(found.status()['processes']['host'], flush=True); time.sleep(3600)"
    )
    support = Path(__file__).parents[1] / "support"
    argv = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(argv, cwd=support, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        host = int(starter.stdout.readline())
        own = traces(folder) - before
        assert {kind for kind, _ in own} == {"interface", "cgroup", "process"}
        os.kill(starter.pid if killed == "starter" else host, signal.SIGKILL)
        until(lambda: not folder.exists(), ENDED_SECONDS)
        starter.kill()
    until(lambda: not own & traces(folder), ENDED_SECONDS)
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


def traces(folder: Path) -> set[tuple[str, str]]:
    """Return the real nodes' traces on this machine, and the processes of that folder, as (kind, name)."""
    interfaces = {("interface", path.name) for path in Path("/sys/class/net").glob("bamboo*")}
    groups = {("cgroup", str(path)) for path in cgroups.HIERARCHIES.glob("*/bamboo-*")}
    return interfaces | groups | {("process", pid) for pid in processes(folder)}


def processes(folder: Path) -> list[str]:
    """Return the processes whose command names the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if str(folder).encode() in command:
            found.append(process.name)
    return found
