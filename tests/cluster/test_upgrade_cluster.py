"""An upgrade from an older version to this one and back, by the chart, while a job trains."""

import io
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from chart_release import CRD, POD_IP, Install
from cluster.client import ApiError, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from crd_kit import strip_rules
from helm_kit import CHART, ROOT
from manifest_kit import minimal
from operator_jobs import digests_of_a_local_run, manifest, slowed
from operator_process import Job

pytest_plugins = ["cluster_kit", "release_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

KUBECTL = str(Path(sys.executable).with_name("kubectl"))
OLDER = "e90637f8"  # until there is a tag: a commit whose CRD lacks many fields, with the same versions of protocols


@pytest.fixture
def older() -> Iterator[Path]:
    """That version's files, where pods see them, too."""
    archive = subprocess.run(
        ["git", "archive", OLDER, "core", "operator", "charts", "crds"], cwd=ROOT, capture_output=True
    )
    if archive.returncode:
        pytest.skip(f"this checkout has not the history back to {OLDER}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def fields(crd: Json) -> set[str]:
    """The paths of all fields of the newest version's spec."""
    return set(_paths(crd["spec"]["versions"][-1]["schema"]["openAPIV3Schema"]["properties"]["spec"], ""))


def _paths(schema: Json, before: str) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{before}.{name}"
        yield from _paths(inner, f"{before}.{name}")


def test_a_job_trains_through_an_upgrade_and_back_and_ends_with_the_same_bits(
    release: Install, older: Path, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """It was stored by the older CRD; the older operator runs from the older version's own code."""
    before, now = (yaml.safe_load((root / "crds/bamboojob.yaml").read_text()) for root in (older, ROOT))
    assert fields(now) - fields(before), "there is something new"
    path = {"name": "PYTHONPATH", "value": f"{older / 'core'}:{older / 'operator'}"}
    bamboo = release(chart=older / "charts/bamboo")
    bamboo.install(env=[POD_IP, path])
    document, slow = slowed(manifest("upgraded", 400, standby=0, topology={"stages": 2}), tmp_path)
    job = Job(cluster.api, namespace, document)
    job.step(3)
    stored = cluster.api.get(job.path)["spec"]
    assert fields(cluster.api.get(CRD)) == fields(before)

    def trains_on() -> None:
        step = job.status()["training"]["step"]
        status = job.step(step + 3)
        assert status["preemptions"] == 0, bamboo.said()
        assert "Traceback" not in bamboo.said()

    bamboo.take_chart(CHART)
    bamboo.upgrade()
    assert fields(cluster.api.get(CRD)) == fields(now)
    trains_on()
    bamboo.rollback(1)
    assert fields(cluster.api.get(CRD)) == fields(before)
    trains_on()
    assert "BambooRuntime" not in bamboo.said(), "the older code runs, which knows none"
    found = cluster.api.get(job.path)["spec"]
    assert found == stored, "what the newer one stored of its own is dropped"
    bamboo.upgrade()
    trains_on()
    slow.unlink()
    status = job.until("Complete")
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)


def test_a_new_version_of_the_api_has_the_same_jobs_and_the_old_one_warns(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """As docs/upgrade.md says, tried on a copy of the CRD in a group of its own."""
    crd = yaml.safe_load((ROOT / "crds/bamboojob.yaml").read_text())
    if cluster.minor < OLDEST_SUPPORTED:
        strip_rules(crd)
    group = f"{namespace}.example"
    crd["metadata"]["name"], crd["spec"]["group"] = f"bamboojobs.{group}", group
    crd["spec"]["names"] |= {"categories": [], "shortNames": []}
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
    jobs = f"/apis/{group}/{{}}/namespaces/{namespace}/bamboojobs"
    cluster.api.create(crd)
    try:
        cluster.api.wait(path, lambda found: "v1alpha1" in (found.get("status") or {}).get("storedVersions", ()))
        document = {**minimal(), "apiVersion": f"{group}/v1alpha1"}
        until_accepted(lambda: cluster.api.request("POST", jobs.format("v1alpha1"), document))

        (old,) = crd["spec"]["versions"]
        new = {**old, "name": "v1beta1"}
        old |= {"storage": False, "deprecated": True, "deprecationWarning": "use v1beta1"}
        cluster.api.patch(path, {"spec": {"versions": [old, new]}})
        name = document["metadata"]["name"]
        found = until_accepted(lambda: cluster.api.get(f"{jobs.format('v1beta1')}/{name}"))
        assert found["apiVersion"] == f"{group}/v1beta1"
        assert found["spec"] == cluster.api.get(f"{jobs.format('v1alpha1')}/{name}")["spec"]
        command = [KUBECTL, "--kubeconfig", str(cluster.kubeconfig), "--cache-dir", str(tmp_path), "-n", namespace]
        told = subprocess.run(
            [*command, "get", f"bamboojobs.v1alpha1.{group}"], capture_output=True, text=True, check=True
        )
        assert "use v1beta1" in told.stderr
        quiet = subprocess.run([*command, "get", f"bamboojobs.v1beta1.{group}"], capture_output=True, text=True)
        assert (quiet.returncode, "use v1beta1" in quiet.stderr) == (0, False)

        # every job is written once, and the old version can go
        assert set(cluster.api.get(path)["status"]["storedVersions"]) == {"v1alpha1", "v1beta1"}
        cluster.api.patch(f"{jobs.format('v1beta1')}/{name}", {"metadata": {"annotations": {"written": "anew"}}})
        cluster.api.patch(f"{path}/status", {"status": {"storedVersions": ["v1beta1"]}})
        cluster.api.patch(path, {"spec": {"versions": [new]}})
        kept = cluster.api.get(f"{jobs.format('v1beta1')}/{name}")
        assert kept["spec"] == found["spec"]
    finally:
        cluster.api.delete(path)


def until_accepted(ask: Callable[[], Json]) -> Json:
    """Its answer, once the API server knows the kind, which it learns a little later than the CRD."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ask()
        except ApiError as error:
            if error.code != 404 or time.monotonic() > deadline:
                raise
        time.sleep(0.2)
