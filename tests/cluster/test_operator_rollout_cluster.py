"""A change of a job's workers that the API server refuses, on a real control plane."""

import pytest

from cluster.handle import Cluster
from operator_jobs import small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_change_that_does_not_work_stops_by_itself_and_is_taken_back(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    """The API server refuses the pod, so nobody leaves."""
    document = small("stalled", standby=0)
    job = Job(installed.api, namespace, document)
    job.until("Protected")
    before = set(job.pods())
    wrong = {"spec": {"hostAliases": [{"ip": "no address", "hostnames": ["a"]}]}}
    job.edit({"worker": {"template": wrong}})
    assert "no address" in job.told("RolloutStalled")
    status = job.wait(lambda s: condition(s, "WorkersUpdated")["reason"] == "RolloutStalled")
    assert condition(status, "WorkersUpdated")["status"] == "False"
    job.step(status["training"]["step"] + 3)
    job.edit({"worker": {"template": {"spec": {"hostAliases": None}}}})
    status = job.until("WorkersUpdated")
    assert (set(job.pods()), status["preemptions"]) == (before, 0)
