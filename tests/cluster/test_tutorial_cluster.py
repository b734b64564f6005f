"""The second half of docs/tutorial.md on this machine: `make cluster`, the page's job, a node that vanishes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster import build
from cluster.handle import Cluster
from helm_kit import Missing, helm
from operator_process import Job
from tutorial_kit import shown

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_job_of_the_tutorial_trains_on_the_cluster_that_make_starts(tmp_path: Path) -> None:
    cache, folder = tmp_path / "bamboo", tmp_path / "bamboo" / "cluster"
    cache.mkdir()
    try:
        programs = {build.GIVEN: str(build.binaries())}
        (cache / helm().parent.name).symlink_to(helm().parent)
    except (Missing, build.Unavailable) as missing:
        pytest.skip(str(missing))
    model = {"first_model.py": shown("python", "first_model.py")}
    container = {
        "name": "trainer",
        "env": [{"name": "PYTHONPATH", "value": "/model"}],
        "volumeMounts": [{"name": "model", "mountPath": "/model"}],
    }
    job = yaml.safe_load(shown("yaml", "first-spot-job.yaml"))
    job["spec"]["training"]["steps"] = 400
    volumes = [{"name": "model", "configMap": {"name": "model"}}]
    job["spec"]["worker"]["template"] = {"spec": {"containers": [container], "volumes": volumes}}

    def make(*words: str) -> str:
        env = {**os.environ, **programs, "BAMBOO_CACHE": str(tmp_path), "PYTHONPATH": "tests/support"}
        argv = [sys.executable, "-m", "cluster", *words]
        return subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout

    assert f"export KUBECONFIG={folder / 'admin.kubeconfig'}" in make("up")
    try:
        cluster = Cluster.attach(folder / "admin.kubeconfig")
        found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "model"}, "data": model}
        cluster.api.create(found, "default")
        cluster.api.create(yaml.safe_load(shown("yaml", "weights.yaml")), "default")
        training = Job(cluster.api, "default", job)
        training.step(50)
        make("fail", "spot-a")
        assert training.until("Complete", seconds=900)["training"]["step"] == 400
    finally:
        make("down")
    assert not folder.exists()
