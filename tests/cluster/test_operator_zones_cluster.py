"""In which zones a job's pods are, as a real scheduler places them."""

import json
import signal
from pathlib import Path

import pytest

from cluster.handle import Cluster
from cluster.nodes import ZONE, spot
from operator_jobs import small
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_pipelines_keep_to_zones(installed: Cluster, namespace: str, tmp_path: Path) -> None:
    installed.add(spot("spot-a2", "zone-a"))
    installed.add(spot("spot-b2", "zone-b"))
    operator = Operator(installed, namespace, tmp_path)
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


def zones_of(cluster: Cluster, job: Job) -> dict[str, str]:
    return {
        name: cluster.api.get(f"/api/v1/nodes/{pod['spec']['nodeName']}")["metadata"]["labels"][ZONE]
        for name, pod in job.pods().items()
    }
