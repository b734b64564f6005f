"""pytest plugin: the operator on the test cluster; needs cluster_kit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.handle import Cluster
from operator_process import Operator, install


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Cluster:
    if cluster.folder is None:
        pytest.skip("this operator is a process of this machine, which a real cluster's pods do not reach")
    install(cluster)
    return cluster


@pytest.fixture
def operator(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[Operator]:
    running = Operator(installed, namespace, tmp_path)
    try:
        yield running
    finally:
        running.kill()
        print(running.said)
    running.check()
