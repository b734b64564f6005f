"""The versions of the API on a real API server while a job trains: both are served, and the old one can go."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bamboo_core.names import BETA, GROUP, PLURAL, VERSION
from cluster.client import ApiError, Json
from cluster.handle import Cluster
from operator_jobs import digests_of_a_local_run, manifest, slowed
from operator_process import CRD, Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

KUBECTL = str(Path(sys.executable).with_name("kubectl"))


def test_a_job_trains_while_the_api_graduates_and_back(
    operator: Operator, installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    """As docs/upgrade.md says. The operator goes on asking for the old version, as one from before would."""
    document, slow = slowed(manifest("graduates", 200, standby=0, topology={"stages": 2}), tmp_path)
    job = Job(installed.api, namespace, {**document, "apiVersion": f"{GROUP}/{VERSION}"})
    in_beta = job.path.replace(VERSION, BETA)
    command = [KUBECTL, "--kubeconfig", str(installed.kubeconfig), "--cache-dir", str(tmp_path), "-n", namespace]

    def kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)

    def trains_on() -> None:
        step = job.status()["training"]["step"]
        assert job.step(step + 3)["preemptions"] == 0

    job.step(3)
    alpha, beta = (installed.api.get(path) for path in (job.path, in_beta))
    assert (beta["apiVersion"], beta["spec"]) == (f"{GROUP}/{BETA}", alpha["spec"])
    assert beta["metadata"]["uid"] == alpha["metadata"]["uid"]
    file = tmp_path / "beta.yaml"
    file.write_text(yaml.safe_dump({**document, "apiVersion": f"{GROUP}/{BETA}"}))
    assert "deprecated" not in kubectl("apply", "-f", str(file)).stderr, "the same job, by its other name"
    assert installed.api.get(job.path)["metadata"]["generation"] == 1

    before = installed.api.get(CRD)
    assert before["status"]["storedVersions"] == [VERSION]
    try:
        old, new = (dict(one) for one in before["spec"]["versions"])
        old |= {"storage": False, "deprecated": True, "deprecationWarning": f"use {BETA}"}
        new |= {"storage": True}
        installed.api.patch(CRD, {"spec": {"versions": [old, new]}})
        trains_on()
        until(lambda: f"use {BETA}" in kubectl("get", f"{PLURAL}.{VERSION}.{GROUP}").stderr)
        assert f"use {BETA}" not in kubectl("get", f"{PLURAL}.{BETA}.{GROUP}").stderr
        installed.api.patch(in_beta, {"metadata": {"annotations": {"written": "anew"}}})
        assert set(installed.api.get(CRD)["status"]["storedVersions"]) == {VERSION, BETA}
        installed.api.patch(f"{CRD}/status", {"status": {"storedVersions": [BETA]}})
        trains_on()
        edited = until_accepted(lambda: installed.api.patch(in_beta, {"spec": {"cleanPodPolicy": "All"}}))
        assert edited["metadata"]["generation"] == 2
        job.wait(lambda status: status.get("observedGeneration") == 2)
    finally:
        installed.api.patch(CRD, {"spec": {"versions": before["spec"]["versions"]}})
    trains_on()  # as after a rollback
    slow.unlink()
    status = job.until("Complete")
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)


def until(done: Callable[[], bool]) -> None:
    """The API server follows a change of a CRD a little later."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def until_accepted(ask: Callable[[], Json]) -> Json:
    """Its answer, once the API server takes it again after a change of the CRD."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ask()
        except ApiError as error:
            if error.code not in (404, 409, 429) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)
