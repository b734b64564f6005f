"""In which zones a job's pods are, as a real scheduler places them, and what the operator records of their nodes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bamboo.traces.files import read_traces
from bamboo_core.traces.trace import Change
from cluster.handle import Cluster
from cluster.nodes import ZONE, spot
from operator_jobs import small
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]
RECORD = "bamboo-operator-nodes"


class Recording(Operator):
    @property
    def more(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("--node-record", f"{self._namespace}/{RECORD}")


def bamboo(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "bamboo", *arguments]
    if arguments[1] == "fetch":
        command += ["--kubeconfig", str(cluster.kubeconfig)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_pipelines_keep_to_zones_and_their_nodes_are_recorded(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    installed.add(spot("spot-a2", "zone-a"))
    installed.add(spot("spot-b2", "zone-b"))
    operator = Recording(installed, namespace, tmp_path)
    try:
        pools = [{"name": "cheap", "preset": "Karpenter", "pricePerHour": "0.9"}]
        topology = {"stages": 2, "pipelines": 2}
        grid = Job(
            installed.api,
            namespace,
            small("grid", gpus=4, topology=topology, spread={"policy": "ZonePerPipeline"}, nodePools=pools),
        )
        status = grid.until("Running")
        zones = zones_of(installed, grid)
        rows = [{zones[worker] for worker in row} for row in json.loads(status["plan"])["pipelines"]]
        assert [len(row) for row in rows] == [1, 1], "a pipeline is in two zones"
        assert rows[0] != rows[1], "both are in one zone"
        nodes = {pod["spec"]["nodeName"] for pod in grid.pods().values()}
        lost = grid.pods()[json.loads(status["plan"])["pipelines"][1][1]]["spec"]["nodeName"]
        installed.fail(lost)
        installed.delete(lost)
        grid.wait(lambda found: found["preemptions"] > 0)
        single = Job(
            installed.api,
            namespace,
            small("single", gpus=1, spread={"policy": "SingleZone"}, nodePools=pools, topology={"stages": 3}),
        )
        single.until("Running")
        assert len(set(zones_of(installed, single).values())) == 1
    finally:
        operator.kill(signal.SIGTERM)
        print(operator.said)
    operator.check()
    file = tmp_path / "ours.jsonl"
    bamboo(installed, "traces", "fetch", "--namespace", namespace, "--output", str(file))
    trace = read_traces([str(file)])
    there = {change.node: change.zone for change in trace.changes if change.change is Change.ADD}
    assert there.keys() >= nodes
    assert {change.node for change in trace.changes if change.change is Change.REMOVE} == {lost}
    assert {change.pool for change in trace.changes} == {"cheap"}
    assert {price.usd_per_hour for price in trace.prices} == {0.9}
    assert json.loads(bamboo(installed, "traces", "show", str(file), "--output", "json"))


def zones_of(cluster: Cluster, job: Job) -> dict[str, str]:
    return {
        name: cluster.api.get(f"/api/v1/nodes/{pod['spec']['nodeName']}")["metadata"]["labels"][ZONE]
        for name, pod in job.pods().items()
    }
