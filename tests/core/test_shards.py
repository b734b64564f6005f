"""Pipelines of one stage whose workers hold the optimizer's state in shards: who holds which; what a loss leaves."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.desired import PlanningView
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Cell, Peer, Plan, plan_problems
from bamboo_core.planning.shards import shard_layers, sharded
from bamboo_core.planning.shares import kept_share
from bamboo_core.planning.transitions import StageLost, improve, takeover
from manifest_kit import bamboojob, training
from replica_kit import copies
from world import World

SIZES = st.lists(st.floats(0, 1e9), min_size=1, max_size=24)


def spec_of(pipelines: int, *, replicas: int = 1) -> JobSpec:
    return parse_manifest(
        bamboojob(
            task={"entrypoint": "a.b:c"},
            training=training(20, 16, 1),
            topology={"stages": 1, "pipelines": pipelines, "shardOptimizer": True},
            redundancy={"mode": "LazyForward", "replicas": replicas},
        )
    )


def begun(sizes: list[float], pipelines: int, *, replicas: int = 1, zones: int = 1, spare: int = 0) -> Plan:
    spec = spec_of(pipelines, replicas=replicas)
    peers = [Peer(worker=f"w{i}", host="h", port=1, zone=f"z{i % zones}") for i in range(pipelines + spare)]
    plan = initial_plan(peers, ((0, len(sizes)),), pipelines, spec.training, spec.redundancy)
    return sharded(plan, spec, sizes)


def view(plan: Plan, dead: set[str], unsynced: set[str] = frozenset()) -> PlanningView:  # type: ignore[assignment]
    held = ((c, w) for c in plan.cells() for w in plan.at(c).replicas)
    return PlanningView(
        plan=plan,
        live={p.worker: p for p in plan.workers if p.worker not in dead},
        leaving={},
        synced=frozenset((c, w) for c, w in held if w not in unsynced),
        redundancy=spec_of(len(plan.pipelines)).redundancy,
        pipelines=len(plan.pipelines),
        generation=0,
    )


@given(sizes=SIZES, pipelines=st.integers(1, 10))
def test_shards_are_a_balanced_partition_or_none(sizes: list[float], pipelines: int) -> None:
    shards = shard_layers(sizes, pipelines)
    if pipelines < 3 or len(sizes) < pipelines:
        assert shards == ()
        return
    assert [0, *(end for _, end in shards)] == [*(first for first, _ in shards), len(sizes)]
    assert len(shards) == pipelines
    largest = max(sum(sizes[slice(*shard)]) for shard in shards)
    for cuts in _neighbours(shards):
        assert largest <= max(sum(sizes[a:b]) for a, b in pairwise(cuts)) * (1 + 1e-9)


def _neighbours(shards: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """Bounds that differ by one layer at one place."""
    bounds = [0, *(end for _, end in shards)]
    moved = []
    for i in range(1, len(bounds) - 1):
        for by in (-1, 1):
            other = [*bounds[:i], bounds[i] + by, *bounds[i + 1 :]]
            if all(a < b for a, b in pairwise(other)):
                moved.append(other)
    return moved


@given(pipelines=st.integers(3, 10), layers=st.integers(0, 8), replicas=st.integers(1, 3), zones=st.integers(1, 3))
def test_every_shard_has_as_many_other_holders_as_are_asked_for(
    pipelines: int, layers: int, replicas: int, zones: int
) -> None:
    plan = begun([1.0] * (pipelines + layers), pipelines, replicas=replicas, zones=zones, spare=1)
    assert plan_problems(plan) == []
    for cell in plan.cells():
        holders = plan.at(cell).holders
        assert len(set(holders)) == 1 + min(replicas, pipelines - 1)
        assert set(holders) <= {plan.at(c).owner for c in plan.cells()}
    load = [len(plan.replicated_by(plan.at(c).owner)) for c in plan.cells()]
    assert max(load) - min(load) <= 1 or zones > 1
    kept = [kept_share(plan, f"w{i}") for i in range(pipelines + 1)]
    assert sorted(layer for share in kept for layer in share) == list(range(pipelines + layers))


@given(pipelines=st.integers(3, 8), lost=st.integers(0, 7))
def test_the_second_holder_goes_on_with_a_lost_shard_and_then_gets_another(pipelines: int, lost: int) -> None:
    plan = begun([1.0] * pipelines, pipelines)
    victim = plan.at(Cell(lost % pipelines, 0)).owner
    after = takeover(view(plan, {victim}))
    assert isinstance(after, Plan)
    assert plan_problems(after) == []
    for cell in plan.cells():
        if plan.at(cell).owner == victim:
            assert after.at(cell).owner in plan.at(cell).replicas, "only a holder can go on with it"
    better = improve(view(after, {victim}))
    assert better is not None
    assert all(len(better.at(c).holders) == 2 for c in better.cells())
    assert len({p.worker for c in after.cells() for p in after.at(c).portions}) > 1, "the work is shared all the same"


def test_both_holders_of_a_shard_at_once_are_one_too_many() -> None:
    plan = begun([1.0] * 5, 5)
    cell = Cell(2, 0)
    assert isinstance(takeover(view(plan, set(plan.at(cell).holders))), StageLost)
    unsynced = view(plan, {plan.at(cell).owner}, {*plan.at(cell).replicas})
    assert isinstance(takeover(unsynced), StageLost), "a copy that is still on its way is none"
    others = {w for w in plan.holders() if w not in plan.at(cell).holders}
    assert copies(plan, view(plan, set()).synced, cell) == 1
    assert isinstance(takeover(view(plan, {min(others)})), Plan)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shards": ((0, 2), (2, 4))}, "there is not one shard of the optimizer's state for each pipeline"),
        ({"shards": ((0, 2), (3, 4), (4, 5))}, "shards are not a partition of the layers"),
        ({"shards": ((0, 2), (2, 2), (2, 5))}, "shards are not a partition of the layers"),
        ({"shards": ((0, 2), (2, 3), (3, 4))}, "shards are not a partition of the layers"),
    ],
)
def test_a_plan_with_other_shards_is_unsound(change: dict[str, object], problem: str) -> None:
    plan = begun([1.0] * 5, 3)
    assert problem in plan_problems(msgspec.structs.replace(plan, **change))


@pytest.mark.parametrize(
    ("topology", "mode", "told"),
    [
        ({"stages": 2, "shardOptimizer": True}, "LazyForward", "2 stages divide the optimizer's state already"),
        ({"stages": 1, "shardOptimizer": True}, "None", "every shard would be lost with its one holder"),
        ({"stages": 1, "shardOptimizer": "yes"}, "LazyForward", "spec.topology.shardOptimizer: expected true or false"),
    ],
)
def test_where_there_is_nothing_to_shard_it_is_said(topology: dict[str, object], mode: str, told: str) -> None:
    wrong = bamboojob(task={"entrypoint": "a.b:c"}, topology={"pipelines": 3, **topology}, redundancy={"mode": mode})
    with pytest.raises(ManifestError, match=told) as error:
        parse_manifest(wrong)
    assert str(error.value).count("spec.") >= 1


def test_a_lost_worker_is_replaced_and_no_shard_is_left_with_one_holder() -> None:
    world = World(1, 4, 1, sharded=True)
    world.settle()
    plan = world.plans[-1]
    assert plan.shards
    world.lose(plan.at(Cell(2, 0)).owner)
    world.settle()
    after = world.plans[-1]
    assert after.shards == plan.shards
    assert after.origin == plan.origin
    assert {len(after.at(c).holders) for c in after.cells()} == {2}
    assert len({after.at(c).owner for c in after.cells()}) == 4
    assert "StageLost" not in [e.reason for e in world.told]


def test_a_world_that_loses_both_holders_says_which_shard() -> None:
    world = World(1, 4, 0, sharded=True)
    world.settle()
    for worker in world.plans[-1].at(Cell(1, 0)).holders:
        world.lose(worker)
    world.settle()
    assert world.finish is not None
    assert "stage 0 of pipeline 1: lost with" in world.finish.message


def test_another_number_of_pipelines_deals_the_shards_anew() -> None:
    """From a cut, as another number of stages does, since each worker then holds other layers' state."""
    world = World(1, 4, 0, least=3, sharded=True)
    world.settle()
    world.away = 10
    world.lose(world.plans[-1].at(Cell(3, 0)).owner)
    world.settle()
    wishes = [message for _, message in world.sent if getattr(message, "hold", False)]
    assert wishes, "the root is asked for a cut"
    assert all(len(plan.pipelines) == 4 for plan in world.plans)


def test_sizes_that_are_not_known_count_as_equal() -> None:
    spec = spec_of(3)
    peers = [Peer(worker=f"w{i}", host="h", port=1) for i in range(3)]
    plan = initial_plan(peers, ((0, 6),), 3, spec.training, spec.redundancy)
    assert sharded(plan, spec, None).shards == ((0, 2), (2, 4), (4, 6))
    assert sharded(plan, spec, (5.0, 1.0, 1.0, 1.0, 1.0, 1.0)).shards == ((0, 1), (1, 2), (2, 6))
