"""The zones in which a job's pods may run, and the nodes generated in them."""

from typing import Any

import pytest

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_zones import allowed_zones, made_up, named_zones, packed, zone_allowed
from bamboo.traces.generate import Generation
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from job_simulation_kit import manifest

ZONE = "topology.kubernetes.io/zone"
ABC = ("a", "b", "c")


def pinned(pod: dict[str, Any], **more: Any) -> JobSpec:
    return parse_manifest(manifest(2, 1, 6, worker={"template": {"spec": pod}}, **more))


def affinity(*terms: tuple[str, list[str]]) -> dict[str, Any]:
    """Return a pod spec with a required affinity to zones. terms: alternatives, each ("In" or "NotIn", zones)."""
    found = [{"matchExpressions": [{"key": ZONE, "operator": how, "values": zones}]} for how, zones in terms]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": found}}
    return {"affinity": {"nodeAffinity": required}}


@pytest.mark.parametrize(
    ("pod", "allowed", "named"),
    [
        ({}, ABC, ()),
        ({"nodeSelector": {ZONE: "b"}}, ("b",), ("b",)),
        ({"nodeSelector": {"disk": "ssd"}}, ABC, ()),
        (affinity(("In", ["a", "c"])), ("a", "c"), ("a", "c")),
        (affinity(("In", ["a"]), ("In", ["b"])), ("a", "b"), ("a", "b")),
        (affinity(("NotIn", ["a"])), ("b", "c"), ()),
        ({"nodeSelector": {ZONE: "c"}, **affinity(("In", ["b", "c"]))}, ("c",), ("c",)),
    ],
)
def test_a_pods_template_says_in_which_zones_it_may_be(pod: Any, allowed: Any, named: Any) -> None:
    spec = pinned(pod)
    assert allowed_zones(spec, ABC) == allowed
    assert named_zones(spec) == named
    assert zone_allowed(spec, ""), "a zone that a recording does not say"


def test_a_job_that_may_be_in_none_of_the_zones_is_refused() -> None:
    told = r"worker.template lets workers be in d only \(topology.kubernetes.io/zone\), and nodes are in a, b, c$"
    with pytest.raises(SimulationError, match=told):
        allowed_zones(pinned({"nodeSelector": {ZONE: "d"}}), ABC)
    assert allowed_zones(pinned({"nodeSelector": {ZONE: "d"}}), ()) == ()


GENERATION = Generation(nodes=99, hours=1.0, removal=0.5, addition=0.9, zones=ABC)
SPREAD = parse_manifest(manifest(2, 3, 6, standby={"workers": 1}))


def test_made_up_nodes_are_as_many_as_the_job_wants_and_where_its_pods_would_be() -> None:
    assert len({c.node for c in made_up(GENERATION, SPREAD, 1).changes if c.at == 0}) == 7
    one = parse_manifest(manifest(2, 3, 6, spread={"policy": "SingleZone"}))
    assert {c.zone for c in made_up(GENERATION, one, 5).changes} == {"a"}
    there = pinned({"nodeSelector": {ZONE: "c"}}, spread={"policy": "SingleZone"})
    assert {c.zone for c in made_up(GENERATION, there, 1).changes} == {"c"}


def test_whole_pipelines_are_packed_into_zones_in_turn() -> None:
    spec = parse_manifest(manifest(2, 4, 8, spread={"policy": "ZonePerPipeline"}, standby={"workers": 1}))
    assert packed(ABC, spec) == {"a": 5, "b": 2, "c": 2}
    assert packed(ABC, spec, first=1) == {"b": 5, "c": 2, "a": 2}
    single = parse_manifest(manifest(2, 4, 8, spread={"policy": "SingleZone"}))
    assert packed(("a", "b"), single) == {"a": 8}


def test_nobody_says_in_which_zones_fewer_pipelines_than_zones_are() -> None:
    spec = parse_manifest(manifest(2, 2, 8, spread={"policy": "ZonePerPipeline"}))
    found = [{c.zone for c in made_up(GENERATION, spec, seed).changes} for seed in (1, 2, 3, 4)]
    assert found == [{"a", "b"}, {"b", "c"}, {"c", "a"}, {"a", "b"}]
