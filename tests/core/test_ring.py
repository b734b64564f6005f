"""Pipelines as rings of workers: their order, and the holders of replicas."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancySpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.heirs import heirs_may_differ
from bamboo_core.planning.plan import Peer, Plan, plan_problems
from bamboo_core.planning.ring import replicas_in, ring, rows
from replica_kit import adjacent_heirs_differ, after_loss, peer, planned, training


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
    """Of workers in zones b, c, a, c and b, four form a ring in which no two neighbours share a zone."""
    peers = [Peer(worker=f"w{i}", host="h", port=1, zone=zone) for i, zone in enumerate("bcacb")]
    plan = initial_plan(peers, ((0, 1), (1, 2), (2, 3), (3, 4)), 1, training(8), RedundancySpec())
    zone = {p.worker: p.zone for p in peers}
    row = [zone[a.owner] for a in plan.pipelines[0]]
    assert all(one != other for one, other in zip(row, [*row[1:], row[0]], strict=True)), row


@pytest.mark.parametrize(
    ("pipelines", "places", "replicas", "mode"),
    [
        (3, "a b a b a b", 1, "Replicas"),
        (4, "a b a b a b a b", 1, "None"),  # each stage in both zones
        (4, "a a a a a a a b", 1, "Replicas"),  # one stage is in zone a only
        (4, "a a a b b b c c", 2, "None"),
        (4, "a a a a a b b c", 2, "Replicas"),
        (4, "an an am am ao ao ap ap", 1, "None"),  # also on nodes n, m, o, p
        (4, "an an an an an an an am", 1, "Replicas"),
    ],
)
def test_in_mode_auto_four_pipelines_do_without_replicas(pipelines: int, places: str, replicas: int, mode: str) -> None:
    peers = [Peer(worker=f"w{i}", host="h", port=1, zone=p[0], node=p[1:]) for i, p in enumerate(places.split())]
    plan = initial_plan(peers, ((0, 1), (1, 2)), pipelines, training(8), RedundancySpec(replicas=replicas))
    assert plan.mode == mode
    assert all(bool(plan.at(cell).replicas) is (mode != "None") for cell in plan.cells())


def on_nodes(nodes: Sequence[str], zones: str = "z") -> list[Peer]:
    """Return a worker for each entry of `nodes`. The letter of a node determines its zone among `zones`."""
    return [
        Peer(worker=f"w{i}", host="h", port=1, zone=zones[ord(node) % len(zones)], node=node)
        for i, node in enumerate(nodes)
    ]


def together(row: Sequence[str]) -> int:
    """Return how many stages of a ring are on the same node as the stage before them."""
    return sum(row[s - 1] == node for s, node in enumerate(row)) if len(row) > 1 else 0


def fewest_together(nodes: Sequence[str], depth: int, pipelines: int) -> int:
    """Return the smallest sum of `together` over all ways to place the pipelines on these nodes."""
    return min(
        sum(together(order[d * depth : (d + 1) * depth]) for d in range(pipelines))
        for order in set(itertools.permutations(nodes, depth * pipelines))
    )


@given(
    st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (2, 2), (3, 2), (2, 3)]),
    st.lists(st.sampled_from("abcd"), min_size=7, max_size=7),
    st.integers(0, 1),
    st.sampled_from(["z", "yz", "xyz"]),
)
def test_neighbours_share_a_node_only_where_no_ring_is_better(
    grid: tuple[int, int], nodes: list[str], spare: int, zones: str
) -> None:
    """`rows` puts neighbours on one node as seldom as the best of all orders, also with a spare worker."""
    depth, pipelines = grid
    peers = on_nodes(nodes[: depth * pipelines + spare], zones)
    where = {p.worker: p.node for p in peers}
    found = rows(peers, depth, pipelines, 1)
    assert len({w for row in found for w in row}) == depth * pipelines
    assert sum(together([where[w] for w in row]) for row in found) == fewest_together(
        [p.node for p in peers], depth, pipelines
    )


@given(
    st.sampled_from([(4, 1), (6, 1), (8, 1), (4, 2), (5, 2), (16, 2)]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_any_node_of_even_ones_may_be_lost(grid: tuple[int, int], per_node: int, replicas: int, order: object) -> None:
    """Any node may be lost if each has `per_node` workers, at most half of all; the last node may have fewer."""
    depth, pipelines = grid
    assume(per_node <= pipelines * (depth // 2))
    peers = on_nodes([chr(97 + i // per_node) for i in range(depth * pipelines)])
    order.shuffle(peers)  # type: ignore[attr-defined]
    layers = tuple((s, s + 1) for s in range(depth))
    plan = initial_plan(peers, layers, pipelines, training(8), RedundancySpec(replicas=replicas))
    assert "any node may be lost with all its workers" in plan.message
    for assignment in itertools.chain(*plan.pipelines):
        assert len({node_of(plan)[w] for w in assignment.holders}) > 1
    load = Counter(w for row in plan.pipelines for a in row for w in a.replicas)
    assert max(load.values()) <= replicas + 1


def node_of(plan: Plan) -> dict[str, str]:
    return {p.worker: p.node for p in plan.workers}


def test_the_replica_of_a_stage_beside_its_neighbours_node_is_kept_farther_away() -> None:
    """Two neighbours on one node have their stages' replicas on one worker of another node."""
    peers = on_nodes("aaabb")
    plan = initial_plan(peers, tuple((s, s + 1) for s in range(5)), 1, training(8), RedundancySpec())
    nodes, row = node_of(plan), plan.pipelines[0]
    assert together([nodes[a.owner] for a in row]) == 1
    assert all(nodes[a.owner] != nodes[a.replicas[0]] for a in row)
    [s] = [s for s, a in enumerate(row) if nodes[a.owner] == nodes[row[s - 1].owner]]
    assert row[s].replicas == row[s - 1].replicas, "one heir has what both had sent to each other"
    assert not heirs_may_differ(plan)
    assert "any node may be lost with all its workers" in plan.message


@pytest.mark.parametrize(
    ("policy", "nodes"), [(SpreadPolicy.SINGLE_ZONE, "aabbccdd"), (SpreadPolicy.ZONE_PER_PIPELINE, "aaccbbdd")]
)
def test_pipelines_in_a_zone_keep_neighbours_on_different_nodes(policy: SpreadPolicy, nodes: str) -> None:
    zones = "z" if policy is SpreadPolicy.SINGLE_ZONE else "yz"
    peers = on_nodes(nodes, zones)
    where = {p.worker: p for p in peers}
    for row in rows(peers, 4, 2, 1, policy):
        assert len({where[w].zone for w in row}) == 1
        assert together([where[w].node for w in row]) == 0


grids = st.tuples(
    st.integers(1, 7), st.integers(1, 2), st.integers(1, 3), st.text("abcd", min_size=1, max_size=7).map("".join)
)


@given(grids)
def test_any_workers_may_be_lost_at_once_up_to_the_number_of_replicas(grid: tuple[int, int, int, str]) -> None:
    stages, pipelines, replicas, _ = grid
    plan = planned(*grid)
    assert plan_problems(plan) == []
    differ = heirs_may_differ(plan)
    least = min(replicas, stages - 1)
    for cell in plan.cells():
        assert len(plan.at(cell).replicas) == least
    load = Counter(w for c in plan.cells() for w in plan.at(c).replicas)
    assert not load or max(load.values()) <= least + (replicas > 1)
    for dead in map(set, itertools.combinations(sorted(plan.worker_ids()), least)):
        after = after_loss(plan, dead) if dead else plan
        assert isinstance(after, Plan), dead
        assert plan_problems(after) == []
        if pipelines == 1 and not differ:
            assert not adjacent_heirs_differ(plan, after), dead


def zones_of(plan: Plan) -> dict[str, str]:
    return {p.worker: p.zone for p in plan.workers}


@pytest.mark.parametrize("stages", [3, 4, 6, 7, 8, 9, 12, 64])
def test_two_zones_of_three_may_be_lost_at_once(stages: int) -> None:
    plan = planned(stages, 1, 2, "abc")
    for lost in itertools.combinations("abc", 2):
        dead = {w for w, zone in zones_of(plan).items() if zone in lost}
        assert isinstance(after_loss(plan, dead), Plan), lost


def test_where_zones_are_even_the_replicas_are_those_before_and_everyone_keeps_as_many() -> None:
    for replicas in (1, 2, 3):
        plan = planned(12, 1, replicas, "abcd")
        owners = [a.owner for a in plan.pipelines[0]]
        for s, assignment in enumerate(plan.pipelines[0]):
            assert assignment.replicas == tuple(owners[(s - back) % 12] for back in range(1, replicas + 1))
