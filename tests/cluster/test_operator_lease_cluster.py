"""Two operators on a real control plane: one works, the other waits, and a job trains on."""

import signal
import time
from collections.abc import Iterator

import pytest

from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import small
from operator_process import LEASE, Job, Operator
from operator_web import ask, stand_in, until_ready, until_step

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


def lease(cluster: Cluster, namespace: str) -> Json:
    spec: Json = cluster.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE}")["spec"]
    return spec


@pytest.fixture
def second(operator: Operator) -> Iterator[Operator]:
    """A second operator, created once the first one works."""
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
