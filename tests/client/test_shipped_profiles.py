"""Simulated steps of the shipped profiles, compared with the published times."""

from typing import Any

import msgspec
import pytest

from bamboo.profiles.files import read_profile, shipped_names
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.grid import initial_plan, layer_ranges
from bamboo_core.planning.plan import Peer
from bamboo_core.planning.profile import Network
from bamboo_core.planning.steps.step_times import StepModel
from manifest_kit import bamboojob, training


class OneConnection(Network, frozen=True, kw_only=True):
    """A network whose links have one connection, as in the published measurements."""

    def link(self, size: float) -> float:
        return self.flow


@pytest.mark.parametrize("name", shipped_names())
def test_a_simulated_step_on_the_published_grid_takes_the_published_time(name: str) -> None:
    """The step contains the sum of gradients over pipelines; the published system had one connection per link."""
    profile = read_profile(name)
    published = profile.published
    assert published is not None
    grid = {"stages": published.on_demand_stages, "pipelines": published.on_demand_pipelines}
    pipelines = published.on_demand_pipelines
    one_sum_each = training(1, published.batch, profile.samples, gradientGroups=pipelines)
    parts: Any = {"task": {"entrypoint": "a:b"}, "training": one_sum_each, "redundancy": {"mode": "None"}}
    spec = parse_manifest(bamboojob(topology=grid, **parts))
    ranges = layer_ranges(profile.costs, spec.topology)
    peers = [Peer(worker=f"w{i}", host="", port=0) for i in range(len(ranges) * pipelines)]
    plan = initial_plan(peers, ranges, pipelines, spec.training, spec.redundancy)
    network = OneConnection(**msgspec.structs.asdict(profile.network))
    figures = msgspec.structs.replace(profile.figures, network=network)
    assert StepModel(figures, spec).seconds(plan, plan.target) == pytest.approx(published.on_demand_seconds, rel=0.005)
