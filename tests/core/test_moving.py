"""What moves when the layers are split anew: the places of workers, and what newcomers get beforehand."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.grid import initial_plan, split_layers
from bamboo_core.planning.plan import Cell, Peer, Plan, plan_problems
from bamboo_core.planning.splits.moving import filled_before, lacking, needed, placed
from bamboo_core.planning.splits.resplit import Beginning, Grid, resplit_plan
from bamboo_core.planning.splits.speeds import WorkEstimate
from manifest_kit import bamboojob, training

LAYERS = 12
SIZES = [1.0] * LAYERS
CUT = CheckpointId(step=5, id="ab12")


def job(stages: int, pipelines: int) -> JobSpec:
    topology = {"stages": stages, "pipelines": pipelines}
    return parse_manifest(bamboojob(task={"entrypoint": "a.b:c"}, training=training(20, 24, 1), topology=topology))


def peers(count: int, zones: int = 1) -> list[Peer]:
    return [Peer(worker=f"w{i}", host="h", port=1, zone=f"z{i % zones}", node=f"n{i}") for i in range(count)]


def planned(stages: int, pipelines: int, workers: list[Peer]) -> Plan:
    spec = job(stages, pipelines)
    return initial_plan(workers, split_layers(SIZES, stages), pipelines, spec.training, spec.redundancy)


def held_by(plan: Plan) -> dict[str, frozenset[int]]:
    return {worker: needed(plan, worker) for worker in plan.worker_ids()}


def onward(plan: Plan, grid: Grid, held: dict[str, frozenset[int]], staying: list[Peer]) -> Plan:
    spec, work = job(len(plan.stages), plan.target.pipelines), WorkEstimate(tuple(SIZES))
    return resplit_plan(plan, grid, spec, work, staying, staying, Beginning(CUT, (), held=held, sizes=SIZES))


@pytest.mark.parametrize(
    ("before", "after", "in_order", "by_layers"),
    [
        ((4, 2), (8, 1), (3, 10), (1, 1)),
        ((6, 1), (3, 2), (8, 32), (4, 24)),
        ((3, 2), (2, 3), (4, 24), (4, 24)),
    ],
)
def test_places_go_to_who_has_most_of_what_they_need(
    before: tuple[int, int], after: tuple[int, int], in_order: tuple[int, int], by_layers: tuple[int, int]
) -> None:
    """Layers that the worker lacks that lacks most, and all together: in the order of their stages, and by layers."""
    there = peers(before[0] * before[1])
    first = planned(*before, there)
    for known, expected in (({}, in_order), (held_by(first), by_layers)):
        lacks = lacking(onward(first, Grid(*after), known, there), held_by(first), SIZES).values()
        assert (max(lacks), sum(lacks)) == expected


@settings(max_examples=30)
@given(
    after=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    zones=st.integers(1, 3),
    nodes=st.integers(1, 18),
    data=st.data(),
)
def test_never_more_moves_than_in_order_and_zones_stay(
    after: tuple[int, int], zones: int, nodes: int, data: st.DataObject
) -> None:
    there = [
        Peer(worker=f"w{i}", host="h", port=1, zone=f"z{i % nodes % zones}", node=f"n{i % nodes}") for i in range(18)
    ]
    held = {p.worker: data.draw(st.frozensets(st.integers(0, LAYERS - 1), max_size=6)) for p in there}
    plan = planned(*after, there)
    other = placed(plan, there, held, SIZES)
    assert plan_problems(other) == []
    lacks, now = lacking(plan, held, SIZES).values(), lacking(other, held, SIZES).values()
    assert (max(now), sum(now)) <= (max(lacks), sum(lacks))
    places = {p.worker: (p.zone, p.node if nodes < 18 else "") for p in there}
    where = [places[plan.at(cell).owner] for cell in plan.cells()]
    assert [places[other.at(cell).owner] for cell in other.cells()] == where
    owners = Counter(other.at(cell).owner for cell in other.cells())
    assert set(owners.values()) == {1}


def test_newcomers_become_replicas_of_the_stages_that_they_will_mostly_need() -> None:
    """Two pipelines of two stages, and two workers more: one pipeline of six, or three of two."""
    there = peers(6)
    first = planned(2, 2, there[:4])
    held = held_by(first)
    after = onward(first, Grid(6, 1), held, there)
    filled = filled_before(first, after, ["w4", "w5"], SIZES, lambda *_: True)
    assert filled == {Cell(0, 1): ("w4",), Cell(1, 0): ("w5",)}, "not both from owners of one pipeline"
    assert (needed(after, "w4"), needed(after, "w5")) == ({8, 9, 10, 11}, {0, 1, 10, 11})
    before = lacking(after, held, SIZES).values()
    held |= {worker: frozenset(range(*first.stages[cell.stage])) for cell, (worker,) in filled.items()}
    now = lacking(onward(first, Grid(6, 1), held, there), held, SIZES).values()
    assert (max(before), max(now)) == (4, 2)
    assert sum(now) <= sum(before) - 6


def test_a_worker_gets_no_more_stages_than_it_has_room_for() -> None:
    there = peers(4)
    first = planned(3, 1, there[:3])
    held = held_by(first)
    after = onward(first, Grid(2, 2), held, there)
    assert set(filled_before(first, after, ["w3"], SIZES, lambda *_: True)) == {Cell(0, s) for s in range(3)}
    assert len(filled_before(first, after, ["w3"], SIZES, lambda _, stages: len(stages) <= 1)) == 1
    assert filled_before(first, after, ["w3"], SIZES, lambda *_: False) == {}
    assert filled_before(first, after, ["stranger"], SIZES, lambda *_: True) == {}
