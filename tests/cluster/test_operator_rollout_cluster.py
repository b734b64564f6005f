"""A change of a job's workers, rolled through it while it trains; one that does not work; and another operator's."""

import copy
from pathlib import Path

import pytest

from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import digests_of_a_local_run, manifest, slowed, small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 300
NEWER = {"name": "NEWER", "value": "1"}


def with_newer(document: Json) -> Json:
    """Its `worker` section with one environment variable more."""
    worker: Json = copy.deepcopy(document["spec"]["worker"])
    trainer = worker["template"]["spec"]["containers"][0]
    trainer["env"] = [*trainer["env"], NEWER]
    return worker


def newer(pod: Json) -> bool:
    return NEWER in pod["spec"]["containers"][0]["env"]


def living(job: Job) -> list[Json]:
    return [p for p in job.pods().values() if p["status"].get("phase") in ("Pending", "Running")]


def test_a_change_is_rolled_through_a_training_job(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    """The operator dies in its middle; the job ends as if nothing had happened."""
    document, slow = slowed(manifest("rolled", STEPS, standby=1, topology={"stages": 2}), tmp_path)
    job = Job(installed.api, namespace, document)
    job.until("Protected")
    job.until("WorkersUpdated")
    job.edit({"worker": with_newer(document)})
    job.told("GivingBack")
    operator.kill()
    operator.start()
    job.until("WorkersUpdated")
    assert [newer(pod) for pod in living(job)] == [True] * 3
    slow.unlink()
    status = job.until("Complete", seconds=900)
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)
    counts = {name: status.get(name, 0) for name in ("preemptions", "restarts", "restores")}
    assert counts == {"preemptions": 0, "restarts": 0, "restores": 0}
    told = [reason for reason, _ in job.events()]
    assert "Takeover" not in told
    assert "PlannedTakeover" in told


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
