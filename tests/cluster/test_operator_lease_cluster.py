"""Two operators at the same time on a real control plane: one works, the other waits; a job trains on meanwhile."""

import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bamboo_core.names import EXIT_FAILED
from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import small
from operator_process import LEASE, PATIENCE, Job, Operator

ELSEWHERE = "on-demand-a"  # a node on which no worker runs

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def stand_in(cluster: Cluster, namespace: str, name: str, **spec: Any) -> str:
    """A pod of that name, for these operators have none; nothing runs it unless the spec says more. Its path."""
    container = {"name": "operator", "image": "x", "command": ["sleep", "1000"]}
    spec = {"schedulerName": "nobody", "containers": [container], **spec}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, namespace)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def ask(operator: Operator, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.web_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()
    except OSError as error:  # it has not begun
        return 0, str(error)


def until_ready(operator: Operator, expected: tuple[int, str] = (200, "ok"), seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while (found := ask(operator, "/readyz")) != expected:
        assert time.monotonic() < deadline, f"it was {found}, not {expected}:\n{operator.said}"
        time.sleep(0.1)


def lease(cluster: Cluster, namespace: str) -> Json:
    spec: Json = cluster.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE}")["spec"]
    return spec


@pytest.fixture
def second(operator: Operator) -> Iterator[Operator]:
    """Begins when the first one works."""
    until_ready(operator)
    other = operator.another("second")
    try:
        yield other
    finally:
        if other.alive:
            other.kill()
        print(other.said)
    other.check()


def step(operator: Operator) -> int:
    """Of its only job, as it knows it at the moment; 0 if it knows of none."""
    found = re.search(r"^bamboo_job_step\{.*\} (\d+)", ask(operator, "/metrics")[1], re.MULTILINE)
    return int(found[1]) if found else 0


def until_step(operator: Operator, number: int, seconds: float = PATIENCE) -> int:
    deadline = time.monotonic() + seconds
    while (found := step(operator)) < number:
        assert time.monotonic() < deadline, f"step {found}:\n{operator.said}"
        time.sleep(0.2)
    return found


def test_the_second_waits_until_the_first_is_gone(
    installed: Cluster, namespace: str, operator: Operator, second: Operator
) -> None:
    pod = stand_in(installed, namespace, operator.identity)
    job = Job(installed.api, namespace, small("two"))
    second.start()
    until_ready(second, (503, f"waiting for the lease held by {operator.identity}"))
    reached = until_step(operator, 1)
    assert ask(second, "/healthz") == (200, "ok")
    assert operator.ports == {operator.port, operator.web_port}
    assert second.ports == {second.web_port}
    held = lease(installed, namespace)
    assert (held["holderIdentity"], held["leaseTransitions"]) == (operator.identity, 0)

    operator.kill()  # its pod is there, where it could be started again
    time.sleep(5)
    assert ask(second, "/readyz")[0] == 503
    installed.api.delete(pod, 0)
    until_ready(second)
    until_step(second, reached + 5)
    assert job.status()["preemptions"] == 0

    assert second.kill(signal.SIGTERM) == 0, second.said
    assert second.said.count("waiting for the lease") == 1
    held = lease(installed, namespace)
    assert (held.get("holderIdentity", ""), held["leaseTransitions"]) == ("", 1)


def test_the_first_ends_when_it_is_evicted_though_no_kubelet_tells_it(
    installed: Cluster, namespace: str, operator: Operator, second: Operator
) -> None:
    """A kubelet hangs: the pod is being deleted, its process lives and has the workers' channels.

    The pod has a node, for the garbage collector soon declares those failed that are deleted and have none.
    """
    pod = stand_in(installed, namespace, operator.identity, nodeName=ELSEWHERE)
    installed.api.wait(pod, lambda found: found["status"].get("phase") == "Running")
    job = Job(installed.api, namespace, small("evicted"))
    second.start()
    until_ready(second, (503, f"waiting for the lease held by {operator.identity}"))
    reached = until_step(operator, 1)
    installed.partition(ELSEWHERE)
    installed.api.delete(pod)
    until_ready(second, (503, f"waiting until {operator.identity} has ended"))
    assert operator.wait() == EXIT_FAILED
    assert f"second holds the lease {namespace}/{LEASE} now" in operator.said
    assert ask(second, "/readyz")[0] == 503

    installed.recover(ELSEWHERE)  # its kubelet hears of the deletion
    until_ready(second)
    until_step(second, reached + 5)
    assert job.status()["preemptions"] == 0
    stand_in(installed, namespace, second.identity)
    operator.start()
    until_ready(operator, (503, "waiting for the lease held by second"))


def test_of_two_replicas_both_are_ready_and_the_one_that_works_has_the_label(
    installed: Cluster, namespace: str, operator: Operator, second: Operator
) -> None:
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "label"}
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    account = {"kind": "ServiceAccount", "name": "bamboo-operator", "namespace": "bamboo-system"}
    version = "rbac.authorization.k8s.io/v1"
    for made in (
        {"apiVersion": version, "kind": "Role", "metadata": {"name": "label"}, "rules": rules},
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": {"name": "label"},
            "roleRef": role,
            "subjects": [account],
        },
    ):
        installed.api.create(made, namespace)
    pods = {o.identity: stand_in(installed, namespace, o.identity) for o in (operator, second)}

    def labelled(name: str) -> bool:
        return "bamboo.dev/active" in (installed.api.get(pods[name])["metadata"].get("labels") or {})

    def until_labelled(name: str, expected: bool) -> None:
        deadline = time.monotonic() + 60
        while labelled(name) != expected:
            assert time.monotonic() < deadline, f"{operator.said}\n{second.said}"
            time.sleep(0.1)

    operator.kill(signal.SIGTERM)
    operator.more = second.more = ("--label-active",)
    operator.start()
    until_labelled(operator.identity, True)
    second.start()
    until_ready(second)
    assert not labelled(second.identity)
    assert second.ports == {second.web_port}
    assert operator.kill(signal.SIGTERM) == 0, operator.said
    until_labelled(second.identity, True)
    assert not labelled(operator.identity)
    until_ready(second)
    assert second.port in second.ports

    operator.start()
    until_ready(operator)
    second.kill()  # it leaves its label
    installed.api.delete(pods[second.identity], 0)
    until_labelled(operator.identity, True)
