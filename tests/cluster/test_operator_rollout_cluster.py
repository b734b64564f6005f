"""A change of a job's workers, rolled through it while it trains; one that does not work; and another operator's."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import digests_of_a_local_run, endless, manifest, slowed, small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 300
NEWER = {"name": "NEWER", "value": "1"}


def rollout(cluster: Cluster, job: Job, *words: str, code: int = 0) -> str:
    """What `bamboo rollout` prints, or complains of."""
    verb, *flags = words
    command = [sys.executable, "-m", "bamboo", "rollout", verb, job.name, *flags, "-n", job.namespace]
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == code, done
    return done.stdout if code == 0 else done.stdout + done.stderr


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
    """Paused in its middle, and with an operator that dies; the job ends as if nothing had happened."""
    document, slow = slowed(manifest("rolled", STEPS, standby=1, topology={"stages": 2}), tmp_path)
    job = Job(installed.api, namespace, document)
    job.until("Protected")
    assert job.until("WorkersUpdated")["rollout"]["state"] == "Complete"
    job.edit({"worker": with_newer(document)})
    job.told("GivingBack")
    rollout(installed, job, "pause")
    job.wait(lambda s: s["rollout"]["state"] == "Paused")
    job.wait(lambda s: condition(s, "Protected")["status"] == "True" and s["workers"]["ready"] == 3)
    held = job.until_pods(lambda pods: [pod["status"].get("phase") for pod in pods.values()] == ["Running"] * 3)
    assert len({newer(pod) for pod in held.values()}) == 2
    operator.kill()
    operator.start()
    status = job.wait(lambda s: condition(s, "Running").get("reason") == "Training")
    assert status["rollout"]["state"] == "Paused"
    rollout(installed, job, "resume")
    said = rollout(installed, job, "status")
    assert said.splitlines()[-1].startswith("all workers of rolled are of revision ")
    assert [newer(pod) for pod in living(job)] == [True] * 3
    slow.unlink()
    status = job.until("Complete", seconds=900)
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)
    counts = {name: status.get(name, 0) for name in ("preemptions", "restarts", "restores")}
    assert counts == {"preemptions": 0, "restarts": 0, "restores": 0}
    told = [reason for reason, _ in job.events()]
    assert "Takeover" not in told
    assert "PlannedTakeover" in told


def test_a_change_that_does_not_work_stops_by_itself_and_is_undone(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    document = small("stalled", standby=0, rollout={"progressDeadlineSeconds": 5})
    job = Job(installed.api, namespace, document)
    job.until("Protected")
    before = set(job.pods())
    job.edit({"worker": {"image": "registry.invalid/no-such-image:1"}})
    why = job.told("RolloutStalled")
    assert "registry.invalid/no-such-image:1" in why
    status = job.wait(lambda s: condition(s, "WorkersUpdated")["reason"] == "RolloutStalled")
    assert condition(status, "WorkersUpdated")["status"] == "False"
    job.until_pods(lambda pods: set(pods) == before)
    job.step(status["training"]["step"] + 3)
    assert "the rollout has stalled: a new worker was not ready within 5 s" in rollout(installed, job, "status", code=1)
    rows = rollout(installed, job, "history").splitlines()
    assert [row.split()[-1] for row in rows[1:]] == ["default)", "force"]
    rollout(installed, job, "undo")
    status = job.until("WorkersUpdated")
    assert "image" not in installed.api.get(job.path)["spec"]["worker"]
    assert (set(job.pods()), status["preemptions"]) == (before, 0)


def test_another_default_image_of_a_newer_operator_is_rolled_through(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    job = Job(installed.api, namespace, endless(manifest("upgraded", standby=0, topology={"stages": 2})))
    job.until("Protected")
    operator.kill()
    operator.more = ("--image", "bamboo-trainer:newer")
    operator.start()
    job.told("RolloutComplete")
    images = {pod["spec"]["containers"][0]["image"] for pod in living(job)}
    assert images == {"bamboo-trainer:newer"}
    assert job.status()["preemptions"] == 0
