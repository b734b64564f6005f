"""What real nodes do with pods: containers, signals, probes, networks, and the loss of power and contact."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cgroups
from cluster.client import Json
from cluster.handle import Cluster
from operator_kit import render
from pod_ends_kit import EVERYWHERE, ON_REAL_NODES, check_ends, check_farewell
from real_cluster_kit import kubectl, pod, start

pytest_plugins = ["cluster_kit"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"
ENDED_SECONDS = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = start(tmp_path_factory.mktemp("images"))
    try:
        yield started
    finally:
        started.stop()


def create(cluster: Cluster, namespace: str, manifest: Json) -> str:
    """The pod's path."""
    cluster.api.create(manifest, namespace)
    return f"/api/v1/namespaces/{namespace}/pods/{manifest['metadata']['name']}"


def running(cluster: Cluster, path: str) -> Json:
    return cluster.api.wait(path, lambda found: found and found["status"].get("phase") == "Running")


def ready(cluster: Cluster, path: str) -> Json:
    return cluster.api.wait(path, lambda found: condition(found, "Ready") == "True")


def condition(found: Json, kind: str) -> str | None:
    conditions = found.get("status", {}).get("conditions", ())
    return next((each["status"] for each in conditions if each["type"] == kind), None)


def container_id(found: Json) -> str:
    text: str = found["status"]["containerStatuses"][0]["containerID"]
    return text


def count(cluster: Cluster, namespace: str, name: str) -> int:
    """How far a counting pod is."""
    return int(cluster.logs(namespace, name).split()[-1])


def until(seconds: float, holds: object) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.2)


def test_an_image_runs_without_a_registry_and_is_probed(cluster: Cluster, namespace: str) -> None:
    probe = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1}
    path = create(cluster, namespace, pod("probed", "echo here; sleep 600", readinessProbe=probe))
    running(cluster, path)
    assert condition(cluster.api.get(path), "Ready") == "False"
    done = kubectl(cluster, namespace, "exec", "probed", "--", "touch", "/tmp/ready")
    assert done.returncode == 0, done.stderr
    ready(cluster, path)
    assert cluster.logs(namespace, "probed") == "here\n"


@pytest.mark.parametrize(
    ("script", "policy"),
    [("echo last words >/dev/termination-log", "File"), ("echo first; echo last words", "FallbackToLogsOnError")],
)
def test_an_end_is_told_with_its_message(cluster: Cluster, namespace: str, script: str, policy: str) -> None:
    path = create(cluster, namespace, pod("talker", f"{script}; exit 7", terminationMessagePolicy=policy))
    found = cluster.api.wait(path, lambda found: found and found["status"].get("phase") == "Failed")
    ended = found["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 7
    assert ended["message"].removeprefix("first\n") == "last words\n"


def test_the_operator_reads_how_pods_end(cluster: Cluster, namespace: str) -> None:
    check_ends(cluster, namespace, EVERYWHERE + ON_REAL_NODES)
    check_farewell(cluster, namespace)


def test_a_pod_runs_as_the_user_that_workers_have(cluster: Cluster, namespace: str) -> None:
    """By the security context that the operator gives to every worker; busybox is an image of root's."""
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
    """Why the pod's container has not started."""
    statuses = found.get("status", {}).get("containerStatuses", ())
    return next((each["state"].get("waiting") or {} for each in statuses), {})


def test_a_pod_has_its_grace_and_no_more(cluster: Cluster, namespace: str) -> None:
    polite = create(cluster, namespace, pod("polite", "trap 'echo bye; exit 0' TERM; echo up; " + COUNT, grace=300))
    stubborn = create(cluster, namespace, pod("stubborn", "trap 'echo no' TERM; echo up; " + COUNT, grace=4))
    for path in (polite, stubborn):
        running(cluster, path)
    for name in ("polite", "stubborn"):
        until(60, lambda name=name: "up" in cluster.logs(namespace, name))
    began = time.monotonic()
    for path in (polite, stubborn):
        cluster.api.delete(path)
    cluster.api.wait(polite, lambda found: not found, 60)
    cluster.api.wait(stubborn, lambda found: not found, 60)
    assert time.monotonic() - began > 4


def test_pods_outlive_kubelet_and_containerd(cluster: Cluster, namespace: str) -> None:
    manifest = pod("counter", COUNT, node="real-a")
    # an old kubelet takes longer to start than a test's node may be silent
    keys = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    manifest["spec"]["tolerations"] = [{"key": key, "operator": "Exists"} for key in keys]
    path = create(cluster, namespace, manifest)
    before = running(cluster, path)
    for program in ("kubelet", "containerd"):
        at = count(cluster, namespace, "counter")
        cluster.restart("real-a", program)
        until(120, lambda at=at: reached(cluster, namespace, at + 20))
    after = cluster.api.get(path)
    assert container_id(after) == container_id(before)
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    running(cluster, create(cluster, namespace, pod("next", "sleep 600", node="real-a")))


def reached(cluster: Cluster, namespace: str, number: int) -> bool:
    """False also while the kubelet is away."""
    done = kubectl(cluster, namespace, "logs", "counter", "--tail=1")
    return done.stdout.strip().isdigit() and int(done.stdout) >= number


def test_a_power_cut_takes_pods_and_a_boot_brings_the_node_back(cluster: Cluster, namespace: str) -> None:
    path = create(cluster, namespace, pod("victim", COUNT, node="real-b"))
    running(cluster, path)
    cluster.fail("real-b")
    assert not [*cgroups.HIERARCHIES.glob("*/bamboo-*-2")]
    cluster.api.wait("/api/v1/nodes/real-b", lambda found: condition(found, "Ready") == "Unknown", 60)
    cluster.api.wait(path, lambda found: "deletionTimestamp" in found["metadata"], 60)
    cluster.recover("real-b")
    cluster.api.wait(path, lambda found: not found, 120)
    running(cluster, create(cluster, namespace, pod("next", "sleep 600", node="real-b")))


@pytest.mark.parametrize("killed", ["starter", "host"])
def test_nothing_outlives_a_cluster_that_is_killed(killed: str, cluster: Cluster, tmp_path: Path) -> None:
    """Not a process, mount, interface, cgroup or file. The cluster of the other tests goes on beside it."""
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
        until(ENDED_SECONDS, lambda: not folder.exists())
        starter.kill()
    until(ENDED_SECONDS, lambda: not own & traces(folder))
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


def traces(folder: Path) -> set[tuple[str, str]]:
    """What this machine has of real nodes, and of any processes of that folder, as (kind, name)."""
    interfaces = {("interface", path.name) for path in Path("/sys/class/net").glob("bamboo*")}
    groups = {("cgroup", str(path)) for path in cgroups.HIERARCHIES.glob("*/bamboo-*")}
    return interfaces | groups | {("process", pid) for pid in processes(folder)}


def processes(folder: Path) -> list[str]:
    """Those whose command names the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if str(folder).encode() in command:
            found.append(process.name)
    return found
