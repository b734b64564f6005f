"""Two jobs of a tenant that may have three workers, at a real API server: the second waits whole until it may."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.names import shard_of
from cluster.handle import Cluster
from operator_jobs import small
from operator_process import LEASE, Job, Operator, condition
from operator_web import stand_in, until_ready, until_said

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

LIST = """format: bamboo-tenants
version: 1
tenants:
- {{name: team, namespaces: ["*"], most: {{workers: {workers}}}}}
"""


def test_a_job_waits_whole_for_its_tenants_bound(installed: Cluster, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(LIST.format(workers=3))

    class Sharing(Operator):
        more = ("--tenants", str(file), "--tenants-interval", "1")

    operator = Sharing(installed, namespace, tmp_path)
    try:
        first = Job(installed.api, namespace, small("first"))
        first.until("Running")
        second = Job(installed.api, namespace, small("second"))
        status = second.wait(lambda s: condition(s, "HeldBack").get("reason") == "TenantBound")
        assert condition(status, "HeldBack")["message"] == (
            "waits until its smallest grid of 2 workers fits beside the tenant's other jobs:"
            " tenant team may have 3 workers"
        )
        assert "smallest grid of 2 workers" in second.told("TenantBound")
        assert second.pods() == {}
        file.write_text(LIST.format(workers=4))
        second.until("Running")
        status = second.wait(lambda s: condition(s, "HeldBack")["status"] == "False")
        assert condition(status, "HeldBack")["reason"] == "NotHeldBack"
        assert condition(first.status(), "Running")["status"] == "True"
        kept = f"/api/v1/namespaces/{namespace}/configmaps/{LEASE}-spending"
        installed.api.wait(kept, lambda found: namespace in (found.get("data") or {}))
    finally:
        operator.kill()
        print(operator.said)
    operator.check()


@pytest.fixture
def neighbor(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A namespace in the other one of two shards."""
    names = (f"{namespace}-{number}" for number in range(100))
    name = next(one for one in names if shard_of(one, 2) != shard_of(namespace, 2))
    path = f"/api/v1/namespaces/{name}"
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    cluster.api.wait(f"{path}/serviceaccounts/default", bool)
    try:
        yield name
    finally:
        cluster.api.request("DELETE", f"{path}/pods", {"gracePeriodSeconds": 0})
        cluster.api.delete(path)


def test_a_tenants_bound_holds_over_two_operators_and_the_death_of_one(
    installed: Cluster, namespace: str, neighbor: str, tmp_path: Path
) -> None:
    """Each looks after one of its two jobs; then the one with the job that runs dies, and the other takes it over."""
    file = tmp_path / "tenants.yaml"
    file.write_text(LIST.format(workers=3))

    class Sharing(Operator):
        more = (
            *("--tenants", str(file), "--tenants-interval", "1", "--shards", "2", "--address", "127.0.0.1"),
            *("--namespace", neighbor),
        )

    pods = {name: stand_in(installed, namespace, name) for name in (Sharing.identity, "second")}
    first = Sharing(installed, namespace, tmp_path)
    second = first.another("second")
    with socket.create_server(("127.0.0.1", 0)) as free:
        second.port = free.getsockname()[1]
    kept = f"/api/v1/namespaces/{namespace}/configmaps/{LEASE}-spending"

    def claimed(name: str, pods: int) -> None:
        def is_so(found: Any) -> bool:
            texts = (found.get("data") or {}).values()
            return any(json.loads(text).get("claims", {}).get(name, {}).get("pods") == pods for text in texts)

        installed.api.wait(kept, is_so)

    try:
        until_ready(first)
        second.start()
        until_ready(second)
        until_said(second, "looks after shard")  # the one for which it has asked
        ours = f"looks after shard {shard_of(namespace, 2)} of 2"
        dies, stays = (second, first) if ours in second.said else (first, second)
        runs = Job(installed.api, namespace, small("runs"))
        runs.until("Running")
        waits = Job(installed.api, neighbor, small("waits"))
        waits.wait(lambda s: condition(s, "HeldBack").get("reason") == "TenantBound")
        claimed("runs", 3)  # one of them for a while, as in a rollout
        claimed("waits", 0)
        dies.kill()
        installed.api.delete(pods[dies.identity], 0)
        until_said(stays, ours, 1 + stays.said.count(ours))
        assert (len(runs.pods()), waits.pods()) == (2, {})
        file.write_text(LIST.format(workers=4))
        waits.until("Running")
        claimed("runs", 2)
        claimed("waits", 2)
        status = runs.status()
        assert (condition(status, "Running")["status"], status["preemptions"]) == ("True", 0)
    finally:
        for one in (first, second):
            if one.alive:
                one.kill()
            print(one.said)
    first.check()
    second.check()
