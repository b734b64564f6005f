"""Workers with several devices on a real control plane; the nodes have no GPUs, so that these are the processor."""

import json
import signal
from pathlib import Path

import pytest

from cluster.client import ApiError
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import GPU
from manifest_kit import training
from operator_jobs import claimed, digests_of_a_local_run, manifest, slowed
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS = 60  # a second each, while there is something to see


@pytest.mark.slow
def test_a_worker_with_two_devices_is_lost_and_the_job_goes_on_with_one_each(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    """The number changes while the job is suspended; the bits are those of one device, undisturbed."""
    document = manifest(
        "several",
        standby=0,
        topology={"stages": 2},
        training=training(STEPS, 16, 4),
        checkpoint={"storage": claimed(installed, namespace)},
    )
    document["spec"]["worker"] |= {"devices": 2, "resources": {"limits": {GPU: 2}}}
    paced, slow = slowed(document, tmp_path)
    job = Job(installed.api, namespace, paced)
    job.step(5)
    row = json.loads(job.status()["plan"])["pipelines"][0]
    assert len(row) == 2
    for pod in job.pods().values():
        assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "2"

    installed.signal(namespace, row[1], signal.SIGKILL)
    assert f"lost {row[1]}" in job.told("Takeover")
    job.step(job.status()["training"]["step"] + 2)

    alone = {"worker": {"devices": 1, "resources": {"limits": {GPU: 1}}}}
    if installed.minor >= OLDEST_SUPPORTED:
        with pytest.raises(ApiError, match=r"worker\.devices.*can change only while the job is suspended"):
            job.edit(alone)
    before = job.status()["training"]["step"]
    job.edit({"suspend": True})
    job.until_pods(lambda pods: not pods)
    job.edit({"suspend": False, **alone})
    assert "goes on from the checkpoint of step" in job.told("Restored")
    slow.unlink()
    status = job.until("Complete")
    assert status["training"]["step"] == STEPS > before
    document["spec"]["worker"] |= alone["worker"]
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)
