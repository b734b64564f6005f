"""An upgrade from an older version to this one and back, by the chart, while a job trains."""

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from chart_release import CRD, POD_IP, Install
from cluster.client import Json
from cluster.handle import Cluster
from helm_kit import CHART, ROOT
from operator_jobs import digests_of_a_local_run, manifest, slowed
from operator_process import Job

pytest_plugins = ["cluster_kit", "release_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

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
