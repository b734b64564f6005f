"""Disturbances on a real control plane: no capacity, deleted pods, suspension, killed operators, no API server."""

import signal
import time
from pathlib import Path

import pytest
from torch.testing import assert_close

import bamboo
from bamboo_core.control.digests import add_digests
from cluster.client import ApiError, Client, Json
from cluster.handle import Cluster
from cluster.nodes import GPU, spot
from manifest_kit import training
from operator_jobs import claimed, digest_of_undisturbed, folder_of_the_claim, slowed, small, undisturbed
from operator_process import PATIENCE, Job, Operator, condition, owners
from waiting import until

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS = 300
AWAY_SECONDS = 10


def disturbed_job(name: str) -> Json:
    return small(name, STEPS, standby=1)


def test_a_job_waits_for_capacity_and_says_so(installed: Cluster, namespace: str, operator: Operator) -> None:
    job = Job(installed.api, namespace, small("hungry", steps=20, gpus=9))
    expected = (
        "0 of 2 workers are ready; 2 worker(s) cannot be scheduled: "  # the scheduler looks at one after the other
    )
    status = job.wait(lambda s: expected in condition(s, "WorkersReady").get("message", ""))
    said = condition(status, "WorkersReady")["message"]
    assert condition(status, "WorkersReady")["reason"] == "Unschedulable"
    assert f"Insufficient {GPU}" in said
    assert status["state"] == "Pending"
    assert float(status["cost"]["perHour"]) == 0
    assert "cannot be scheduled" in job.told("Unschedulable")
    installed.add(spot("spot-d", "zone-d", gpus=18))
    status = job.until("Complete")
    assert condition(status, "WorkersReady")["reason"] == "JobOver"


# Checkpoints


def test_with_checkpoints_a_job_outlives_all_its_pods_and_a_suspension(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    """A job restores its checkpoint after the loss of all its pods, and again after a suspension. Its final weights,
    which the claim keeps, equal those of an undisturbed run.
    """
    checkpoint = {"storage": claimed(installed, namespace), "everySteps": 1}
    document = small("lasting", 30, training=training(30, 8, 2), checkpoint=checkpoint)
    paced, slow = slowed(document, tmp_path, 2.5)
    job = Job(installed.api, namespace, paced)
    job.wait(lambda status: status.get("checkpoint", {}).get("lastStep", 0) >= 1)
    for pod in job.pods():
        installed.api.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}", 0)
    assert "goes on from the checkpoint of step" in job.told("Restored")
    at = job.wait(lambda status: status["restores"] == 1)["checkpoint"]["lastStep"]
    job.wait(lambda status: status["checkpoint"]["lastStep"] > at)
    before = job.status()["training"]["step"]
    job.edit({"suspend": True})
    job.until_pods(lambda pods: not pods)
    assert job.status()["checkpoint"]["lastStep"] >= before, "its state is kept first"
    job.edit({"suspend": False})
    assert job.told("Restored")
    slow.unlink()
    status = job.until("Complete")
    accepted = condition(status, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "Accepted")
    assert status["checkpoint"]["lastStep"] == 30, "the last step has one"
    expected = undisturbed(document)
    assert add_digests(status["digests"]) == add_digests(expected.digests)
    kept = folder_of_the_claim(installed, namespace)
    assert [one.name for one in kept.iterdir()] == ["lasting"]
    assert_close(bamboo.load(kept / "lasting" / "checkpoints"), expected.weights, rtol=0, atol=0)


@pytest.mark.slow
def test_the_operator_is_killed_at_eleven_places_of_a_jobs_life(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    checkpoint = {"storage": claimed(installed, namespace), "everySteps": 1}
    document = small("killed", 80, standby=1, training=training(80, 8, 2), checkpoint=checkpoint)
    paced, slow = slowed(document, tmp_path)

    def killed() -> None:
        operator.kill()
        time.sleep(1)
        operator.start()

    def until_replaced(victim: str) -> None:
        job.wait(lambda s: victim not in owners(s) and condition(s, "Degraded")["status"] == "False")

    job = Job(installed.api, namespace, paced)
    killed()  # before the first pod, or just after it
    job.until_pods(lambda pods: len(pods) == 3)
    killed()  # before the first plan
    job.step(2)
    killed()  # in training
    job.step(job.status()["training"]["step"] + 2)

    victim = owners(job.status())[1]
    node = job.pods()[victim]["spec"]["nodeName"]
    installed.taint(node, "cloud.google.com/impending-node-termination", "", "NoSchedule")
    job.told("NoticeReceived")
    killed()  # in a planned takeover
    job.until_pods(lambda pods: victim not in pods or pods[victim]["status"]["phase"] == "Succeeded")
    installed.untaint(node, "cloud.google.com/impending-node-termination")
    until_replaced(victim)

    victim = owners(job.status())[0]
    installed.signal(namespace, victim, signal.SIGKILL)
    killed()  # in a takeover
    until_replaced(victim)

    job.edit({"standby": {"workers": 2}})
    killed()  # before a larger number of workers has its effect
    job.until_pods(lambda pods: sum(pod["status"].get("phase") == "Running" for pod in pods.values()) == 4)

    job.edit({"suspend": True})
    killed()  # between the suspension and its effect
    job.until_pods(lambda pods: not pods)
    job.edit({"suspend": False})
    killed()  # before the job goes on
    job.wait(lambda status: condition(status, "Running").get("status") == "True")

    for pod in job.pods():
        installed.api.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}", 0)
    job.told("Restoring")
    killed()  # while the job waits for workers that restore
    job.wait(lambda status: status["restores"] >= 1 and condition(status, "Running").get("status") == "True")

    slow.unlink()
    job.step(75)
    killed()  # at the end
    status = job.until("Complete")
    assert (status["training"]["step"], status["checkpoint"]["lastStep"]) == (80, 80)
    assert add_digests(status["digests"]) == digest_of_undisturbed(document)
    job.delete()
    killed()  # in the deletion
    job.until_gone()


@pytest.mark.slow
def test_the_api_server_may_be_away(installed: Cluster, namespace: str, operator: Operator) -> None:
    document = disturbed_job("cut-off")
    job = Job(installed.api, namespace, document)
    job.until("WorkersReady")
    victim = owners(job.status())[1]
    with installed.without():
        time.sleep(1)
        installed.signal(namespace, victim, signal.SIGKILL)
        time.sleep(AWAY_SECONDS - 1)  # all steps are done before it is back
    until(lambda: is_ready(installed.api), PATIENCE)
    status = job.until("Complete")
    assert add_digests(status["digests"]) == digest_of_undisturbed(document)
    assert status["preemptions"] == 1
    assert status["takeovers"] >= 1
    for reason in ("Takeover", "TakenOver", "Complete"):  # told after the status is written
        job.told(reason)
    job.until_pods(lambda pods: all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in pods.values()))
    assert operator.alive
    assert "Request attempt" not in operator.said, "kopf's words at each try"


def is_ready(api: Client) -> bool:
    try:
        return bool(api.text("GET", "/readyz"))
    except (ApiError, OSError):
        return False
