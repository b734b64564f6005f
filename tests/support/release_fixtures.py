"""pytest plugin: releases of the chart on the test cluster; goes with cluster_kit."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from chart_release import Install, Release, no_crd
from cluster.handle import Cluster
from helm_kit import CHART, HelmError, Missing, helm


@pytest.fixture
def release(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Install]:
    """Makes releases, not installed yet, of names of their own; on a cluster without the CRD."""
    if cluster.folder is None:
        pytest.skip("these tests delete the CRD: they are for the test cluster only")
    try:
        helm()
    except Missing as missing:
        pytest.skip(str(missing))
    made: list[Release] = []

    def make(major: str = "4", where: str = namespace, chart: Path = CHART) -> Release:
        folder = tmp_path / f"release-{len(made)}"
        folder.mkdir()
        made.append(Release(cluster, where, folder, f"bamboo-{secrets.token_hex(3)}", major, chart=chart))
        return made[-1]

    with no_crd(cluster.api):
        try:
            yield make
        finally:
            for one in made:
                try:
                    print(one.said())
                    one.uninstall()
                except (HelmError, ValueError):
                    pass  # it is not installed (any more)
