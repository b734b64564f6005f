"""Two jobs of a tenant that may have three workers, at a real API server: the second waits whole until it may."""

from pathlib import Path

import pytest

from cluster.handle import Cluster
from operator_jobs import small
from operator_process import LEASE, Job, Operator, condition

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
