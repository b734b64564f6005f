"""Pipelines as rings of workers: who follows whom, and who keeps whose replicas."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bamboo.job.spec import RedundancySpec
from bamboo.planning.grid import initial_plan
from bamboo.planning.plan import Peer
from bamboo.planning.ring import replicas_in, ring
from layer_split_kit import peer, training


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_neighbours_sit_in_different_zones_where_possible(zones: list[str]) -> None:
    order = ring([peer(f"w{i}", z) for i, z in enumerate(zones)], len(zones))
    most = max(zones.count(z) for z in set(zones))
    clashes = sum(a.zone == b.zone for a, b in itertools.pairwise(order))
    assert len({p.worker for p in order}) == len(zones)
    assert clashes <= max(0, most - 1 - (len(zones) - most))


def test_the_shadow_is_the_nearest_other_predecessor() -> None:
    assert replicas_in(["a", "b", "c"], 1, {}) == (("c",), ("a",), ("b",))
    assert replicas_in(["a", "b", "b"], 1, {})[2] == ("a",)
    assert replicas_in(["a", "b", "c"], 1, {}, {"b"})[2] == ("a",)
    assert replicas_in(["a", "a"], 1, {}) == ((), ())


def test_the_ends_of_a_pipeline_are_neighbours_too() -> None:
    """Workers in zones b, c, a, c, b: b, c, b, a keeps all neighbours apart, b, c, a, b does not."""
    peers = [Peer(worker=f"w{i}", host="h", port=1, zone=zone) for i, zone in enumerate("bcacb")]
    plan = initial_plan(peers, ((0, 1), (1, 2), (2, 3), (3, 4)), 1, training(8), RedundancySpec())
    zone = {p.worker: p.zone for p in peers}
    row = [zone[a.owner] for a in plan.pipelines[0]]
    assert all(one != other for one, other in zip(row, [*row[1:], row[0]], strict=True)), row
