"""The history of a job on a cluster, whose root workers, pods and operator are lost."""

import json
import signal
from pathlib import Path

import pytest

from bamboo_core.history.files import find
from bamboo_core.history.merge import curve, merged
from bamboo_core.history.records import EventRecord, GapRecord
from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import claimed, folder_of_the_claim, local_run, slowed, small
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

STEPS = 120


def owners(status: Json) -> list[str]:
    """Of the only pipeline's stages. (A plan names those that were lost, too.)"""
    row: list[str] = json.loads(status["plan"])["pipelines"][0]
    return row


def scalars(folder: Path) -> dict[int, float]:
    """The losses that TensorBoard shows."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {one.step: one.value for one in events.Scalars("loss")}


@pytest.mark.slow
def test_the_history_and_its_loggers_go_on_after_roots_pods_and_operator_are_lost(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    document = small("told", STEPS, standby=1, checkpoint={"storage": claimed(installed, namespace), "everySteps": 20})
    document["spec"]["training"]["loggers"] = [{"name": "tensorboard", "type": "TensorBoard"}]
    paced, slow = slowed(document, tmp_path)
    job = Job(installed.api, namespace, paced)
    job.step(3)
    for stage in (0, 1):  # of one pipeline: one of them is the root, and the other one after it
        owner = owners(job.status())[stage]
        installed.signal(namespace, owner, signal.SIGKILL)
        job.wait(lambda status, owner=owner: owner not in owners(status) and status["state"] == "Running")
        job.step(job.status()["training"]["step"] + 2)
    operator.kill()
    operator.start()
    slow.unlink()
    job.wait(lambda status: status.get("checkpoint", {}).get("lastStep", 0) >= 20)
    slow.touch()
    for pod in job.pods():
        installed.api.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}", 0)
    job.wait(lambda status: status["restores"] == 1)
    slow.unlink()
    job.until("Complete")

    kept = folder_of_the_claim(installed, namespace) / "told" / "checkpoints"
    records = merged(find(str(kept)).read_all())
    assert not [record for record in records if isinstance(record, GapRecord)]
    reasons = {record.reason for record in records if isinstance(record, EventRecord)}
    assert {"Started", "Takeover", "TakenOver", "Restored"} <= reasons
    undisturbed = local_run(document | {"spec": without_storage(document)}, tmp_path) / "history"
    expected = {step.step: step.loss for step in curve(merged(find(str(undisturbed / "told")).read_all()))}
    assert {step.step: step.loss for step in curve(records)} == expected
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert scalars(kept / "history" / "told" / "tensorboard") == pytest.approx(expected)


def without_storage(document: Json) -> Json:
    return {key: value for key, value in document["spec"].items() if key != "checkpoint"}
