"""Nodes with several workers, at the coordinator: each is lost with all of them, or gets notice."""

import random

import msgspec
import pytest

from bamboo_core.coordinator.events import PreemptionNotice
from bamboo_core.coordinator.job_status import status
from bamboo_core.job.spec import RedundancySpec
from bamboo_core.planning.desired import PlanningView, Urgency
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan
from bamboo_core.planning.transitions import drain, improve, takeover
from replica_kit import TRAINING
from world import World

GRIDS = [
    (3, 1, 2),
    (4, 1, 2),
    (6, 1, 3),
    (8, 1, 2),
    (4, 2, 4),
    (3, 2, 2),
    (1, 4, 2),
]  # stages, pipelines, workers per node


def nodes(plan: Plan) -> dict[str, str]:
    return {peer.worker: peer.node for peer in plan.workers}


def current(world: World) -> Plan:
    assert world.state.plan is not None
    return world.state.plan


def workers_on(world: World, node: str) -> list[str]:
    return [w for w, record in world.state.workers.items() if record.peer.node == node]


def owning(world: World) -> list[str]:
    """Nodes whose workers own cells."""
    plan = current(world)
    return sorted({nodes(plan)[plan.at(cell).owner] for cell in plan.cells()})


def assert_apart(world: World) -> None:
    """Every state is held on two nodes: by a replica, or by another pipeline's owner."""
    plan = current(world)
    for cell in plan.cells():
        same = [c for c in plan.cells() if c.stage == cell.stage]
        assert len({nodes(plan)[w] for c in same for w in plan.at(c).holders}) > 1, cell
    seen = status(world.state, world.now)
    assert not seen.unprotected
    assert seen.nodes is not None
    assert seen.nodes > 1


@pytest.mark.parametrize(("stages", "pipelines", "per_node"), GRIDS)
@pytest.mark.parametrize("standby", [0, 1, 4])
def test_one_node_after_the_other_is_lost_and_no_stage_with_it(
    stages: int, pipelines: int, per_node: int, standby: int
) -> None:
    """Their workers are heard of one by one, in any order, and nobody says what he holds. New ones take their place."""
    for seed in range(4):
        chance, world = random.Random(seed), World(stages, pipelines, standby, per_node=per_node)
        world.settle()
        for _ in range(5):
            assert_apart(world)
            gone = workers_on(world, chance.choice(owning(world)))
            chance.shuffle(gone)
            for worker in gone:
                world.lose(worker)
            world.settle()
            assert world.finish is None
        told = {e.reason for e in world.told}
        assert not told & {"StageLost", "Restoring"}
        assert all(len(current(world).owned_by(w)) < 2 for w in current(world).worker_ids()), "all is healed"


@pytest.mark.parametrize(("stages", "pipelines", "per_node"), [(4, 1, 2), (6, 1, 3), (4, 2, 4)])
@pytest.mark.parametrize("seconds", [0.05, 600.0])
def test_nobody_on_a_node_that_will_go_takes_over_from_another_one_there(
    stages: int, pipelines: int, per_node: int, seconds: float
) -> None:
    world = World(stages, pipelines, 0, per_node=per_node)
    world.settle()
    node, before = owning(world)[0], len(world.plans)
    leaving = workers_on(world, node)
    for worker in leaving:
        world.tell(PreemptionNotice(worker, seconds))
    world.settle()
    assert not set(workers_on(world, node)) & set(current(world).holders())
    for old, new in zip(world.plans[before - 1 :], world.plans[before:], strict=False):
        moved = [c for c in new.cells() if new.at(c).owner != old.at(c).owner]
        assert not {new.at(c).owner for c in moved} & set(leaving)


def placed(**where: str) -> dict[str, Peer]:
    return {worker: Peer(worker=worker, host="h", port=1, node=node) for worker, node in where.items()}


def four_stages(*replicas: tuple[str, ...]) -> Plan:
    """Of w0 to w3, on nodes a and b in turn. replicas: of each stage, if they are not its predecessor."""
    peers = placed(w0="a", w1="b", w2="a", w3="b")
    plan = initial_plan(list(peers.values()), tuple((s, s + 1) for s in range(4)), 1, TRAINING, RedundancySpec())
    held = replicas or tuple((f"w{(s - 1) % 4}",) for s in range(4))
    row = tuple(Assignment(owner=f"w{s}", replicas=held[s]) for s in range(4))
    return msgspec.structs.replace(plan, pipelines=(row,), workers=tuple(peers.values()))


def looking(plan: Plan, live: dict[str, Peer], leaving: dict[str, Urgency] | None = None) -> PlanningView:
    """With all replicas in step."""
    synced = frozenset((cell, w) for cell in plan.cells() for w in plan.at(cell).replicas)
    plan = msgspec.structs.replace(plan, workers=tuple({**{p.worker: p for p in plan.workers}, **live}.values()))
    return PlanningView(
        plan=plan,
        live=live,
        leaving=leaving or {},
        synced=synced,
        redundancy=RedundancySpec().on(1),
        pipelines=1,
        generation=0,
    )


def test_who_heals_a_pipeline_is_on_another_node_than_the_owners_around() -> None:
    """w3 runs stages 3 and 0, since w0 is gone: x would be beside w1 and w3, y is not."""
    row = (Assignment(owner="w3", replicas=("w2",)), *four_stages().pipelines[0][1:])
    plan = msgspec.structs.replace(four_stages(), pipelines=(row,))
    live = placed(w1="b", w2="a", w3="b", x="b", y="c")
    healed = improve(looking(plan, live))
    assert healed is not None
    assert {"x", "y"} & set(healed.at(Cell(0, 0)).replicas) == {"y"}


def test_the_heir_of_a_lost_or_leaving_worker_is_on_another_node_than_it_if_there_is_one() -> None:
    plan = four_stages(("w2", "w3"), ("w0",), ("w1",), ("w2",))
    after = takeover(looking(plan, placed(w1="b", w2="a", w3="b")))
    assert isinstance(after, Plan)
    assert after.at(Cell(0, 0)).owner == "w3"
    left = drain(looking(plan, placed(w0="a", w1="b", w2="a", w3="b"), {"w0": Urgency.NOW}))
    assert left is not None
    assert left.at(Cell(0, 0)).owner == "w3"


def test_stages_whose_holders_are_all_on_one_node_get_a_replica_on_a_spare_one() -> None:
    """It has room for one more than usual, so of three such stages it takes two."""
    here = placed(w0="a", w1="a", w2="a")
    plan = initial_plan(list(here.values()), tuple((s, s + 1) for s in range(3)), 1, TRAINING, RedundancySpec())
    assert improve(looking(plan, here)) is None
    copied = improve(looking(plan, {**here, **placed(x="b")}))
    assert copied is not None
    assert [cell.stage for cell in copied.replicated_by("x")] == [0, 1]
    both = improve(looking(plan, {**here, **placed(x="b", y="c")}))
    assert both is not None
    assert [len({"x", "y"} & set(both.at(Cell(0, stage)).replicas)) for stage in range(3)] == [1, 1, 1]
