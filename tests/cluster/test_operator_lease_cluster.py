"""Two operators on a real control plane: the second waits until the first one's pod is gone, and a job trains on."""

import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import small
from operator_process import LEASE, PATIENCE, Job, Operator, stand_in
from waiting import until

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


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
    until(lambda: ask(operator, "/readyz") == expected, seconds, lambda: operator.said)


def step(operator: Operator) -> int:
    """Return the step that the operator's metrics show for its only job; 0 without a job."""
    found = re.search(r"^bamboo_job_step\{.*\} (\d+)", ask(operator, "/metrics")[1], re.MULTILINE)
    return int(found[1]) if found else 0


def until_step(operator: Operator, number: int, seconds: float = PATIENCE) -> int:
    return until(lambda: found if (found := step(operator)) >= number else 0, seconds, lambda: operator.said)


def lease(cluster: Cluster, namespace: str) -> Json:
    spec: Json = cluster.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE}")["spec"]
    return spec


@pytest.fixture
def second(operator: Operator) -> Iterator[Operator]:
    """Wait until the first operator is ready. Yield a second, unstarted one; kill it and check its log afterwards."""
    until_ready(operator)
    other = operator.another("second")
    try:
        yield other
    finally:
        if other.alive:
            other.kill()
        print(other.said)
    other.check()


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
