"""A stranger's afternoon, by the programs that strangers use: helm, kubectl and bamboo, in the order of the docs."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bamboo_core.control.digests import add_digests
from chart_release import CRD, Release, labelled, no_crd, until_none
from cluster.client import Json
from cluster.handle import Cluster
from helm_kit import ROOT, HelmError, Missing, helm
from operator_jobs import TOLERATE, digest_of_undisturbed, slowed

pytest_plugins = ["cluster_kit"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = Path(sys.executable).parent
STEPS, SECONDS = 60, 2.5  # of a step, while there is something to see


class Stranger:
    """At a shell with that kubeconfig."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        self._namespace = namespace

    def types(self, program: str, *arguments: str, seconds: float = 120) -> str:
        """What is printed; it has to end well."""
        command = [str(PROGRAMS / program), *arguments, "--namespace", self._namespace]
        began = time.monotonic()
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=seconds)
        print(f"$ {program} {' '.join(arguments)}  # {time.monotonic() - began:.1f} s\n{done.stdout}{done.stderr}")
        assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture
def bamboo(cluster: Cluster, tmp_path: Path) -> Iterator[Release]:
    """Nothing of it is installed yet, not even its namespace."""
    if cluster.folder is None:
        pytest.skip("this test deletes the CRD: it is for the test cluster only")
    try:
        helm()
    except Missing as missing:
        pytest.skip(str(missing))
    where = f"bamboo-system-{secrets.token_hex(3)}"
    with no_crd(cluster.api):
        release = Release(cluster, where, tmp_path, f"bamboo-{secrets.token_hex(3)}")
        try:
            yield release
        finally:
            try:
                print(release.said())
                release.uninstall()
            except (HelmError, ValueError):
                pass  # it is not installed any more
            cluster.api.delete(f"/api/v1/namespaces/{where}")


def adapted(path: Path, folder: Path) -> tuple[Json, Path, Path]:
    """The example for nodes that are spot nodes by label and taint; with a smaller model, and slow for a while.

    The document, its file, and the file that has to go before training is fast.
    """
    document: Json = yaml.safe_load(path.read_text())
    spec = document["spec"]
    spec["task"]["config"] |= {"dModel": 32, "heads": 2, "blocks": 3, "context": 16}
    spec["training"] |= {"steps": STEPS, "globalBatchSize": 16, "microBatchSize": 4}
    spec["nodePools"] = [{"name": "spot", "preset": "Karpenter", "pricePerHour": "0.90"}]
    spec["worker"] = {"template": {"spec": {"tolerations": TOLERATE}}}
    document, slow = slowed(document, folder, SECONDS)
    written = folder / path.name
    written.write_text(yaml.safe_dump(document))
    return document, written, slow


def test_a_stranger_gets_from_nothing_to_a_trained_model_and_back(
    bamboo: Release, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    stranger = Stranger(cluster, namespace)
    document, example, slow = adapted(ROOT / "examples" / "quickstart.yaml", tmp_path)

    assert "kubectl apply -f examples/quickstart.yaml" in bamboo.install(dashboards={"enabled": True})
    stranger.types("bamboo", "submit", str(example), "--dry-run", "--no-load")
    assert "bamboojob.bamboo.dev/quickstart created" in stranger.types("kubectl", "apply", "-f", str(example))
    for condition in ("Running", "Degraded=False"):  # it trains, and every stage is held twice
        stranger.types("kubectl", "wait", f"--for=condition={condition}", "bamboojob/quickstart", "--timeout=100s")
    header, row = stranger.types("kubectl", "get", "bamboojobs").splitlines()
    assert header.split()[:3] == ["NAME", "STATE", "STAGES"]
    assert row.split()[:3] == ["quickstart", "Running", "4"]

    # drills: a worker is taken away without notice, then another one with
    said = stranger.types("bamboo", "preempt", "quickstart", "--stage", "2", "--kill", "--yes")
    assert "is taken away without notice" in said
    said = stranger.types("bamboo", "preempt", "quickstart", "--stage", "1", "--notice", "--yes")
    assert "gets notice" in said

    measured = metrics(bamboo)
    assert re.search(r'^bamboo_job_step\{.*job="quickstart".*\} [1-9]', measured, re.MULTILINE), measured
    slow.unlink()
    boards = dashboards(cluster)
    assert len(boards) == len(list((ROOT / "dashboards").glob("*.json")))
    assert all(board["title"] and board["panels"] for board in boards)

    stranger.types("kubectl", "wait", "--for=condition=Complete", "bamboojob/quickstart", "--timeout=400s", seconds=420)
    job = json.loads(stranger.types("kubectl", "get", "bamboojob", "quickstart", "--output=json"))
    assert job["status"]["preemptions"] == 2
    told = stranger.types("kubectl", "describe", "bamboojob", "quickstart")
    assert "Takeover" in told
    assert "Complete" in told
    assert add_digests(job["status"]["digests"]) == digest_of_undisturbed(document)

    stranger.types("kubectl", "delete", "bamboojob", "quickstart")
    bamboo.uninstall()
    bamboo.until_gone(allowed=lambda name: name.endswith(".bamboo.dev"))
    stranger.types("kubectl", "delete", "crd", "bamboojobs.bamboo.dev")
    cluster.api.wait(CRD, lambda found: not found)
    bamboo.until_gone()
    Stranger(cluster, bamboo.namespace).types("kubectl", "delete", "secret", *bamboo.kept_secrets)
    assert bamboo.leftovers() == []
    until_none(lambda: labelled(cluster.api, "bamboo.dev/job-name=quickstart"))


def metrics(release: Release) -> str:
    url = f"http://{release.pod()['status']['podIP']}:8080/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def dashboards(cluster: Cluster) -> list[Json]:
    """As Grafana's sidecar finds them."""
    maps = cluster.api.get("/api/v1/configmaps", labelSelector="grafana_dashboard=1")["items"]
    return [json.loads(text) for found in maps for text in found["data"].values()]
