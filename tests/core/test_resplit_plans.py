"""Re-splits: plans that continue a job on another grid or split, and how the coordinator reaches them."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Outcome, PreemptionNotice, Tick
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.grid import initial_plan, layer_ranges, split_layers
from bamboo_core.planning.plan import Cell, Peer, Plan, plan_misfits, plan_problems
from bamboo_core.planning.splits.resplit_plans import (
    Beginning,
    Grid,
    filled_before,
    grid_of,
    in_places,
    lacking,
    moved_plan,
    needed,
    placed,
    resplit_plan,
    sources_of,
)
from bamboo_core.planning.splits.speeds import WorkEstimate
from manifest_kit import bamboojob, training
from slow_world import Slowed
from world import World, back, held

LAYERS = 12
CUT = CheckpointId(step=5, id="ab12")


def job(stages: int, pipelines: int = 1) -> JobSpec:
    topology = {"stages": stages, "pipelines": pipelines}
    return parse_manifest(bamboojob(task={"entrypoint": "a.b:c"}, training=training(20, 24, 1), topology=topology))


def peers(count: int, zones: int = 1, nodes: int | None = None) -> list[Peer]:
    there = (i % (nodes or count) for i in range(count))
    return [
        Peer(worker=f"w{i}", host="h", port=1, zone=f"z{node % zones}", node=f"n{node}") for i, node in enumerate(there)
    ]


@given(
    stages=st.integers(1, 6),
    pipelines=st.integers(1, 3),
    lost=st.sets(st.integers(0, 17)),
    data=st.data(),
    costs=st.lists(st.floats(0, 1e6), min_size=LAYERS, max_size=LAYERS),
)
def test_the_plan_after_a_cut_is_sound_and_can_be_this_jobs(
    stages: int, pipelines: int, lost: set[int], data: st.DataObject, costs: list[float]
) -> None:
    spec = job(stages, pipelines)
    everybody = peers(stages * pipelines, zones=3)
    first = initial_plan(everybody, layer_ranges(costs, spec.topology), pipelines, spec.training, spec.redundancy)
    live = [peer for i, peer in enumerate(everybody) if i not in lost] + peers(20, zones=3)[18:]
    staying = data.draw(st.lists(st.sampled_from(live), unique=True, min_size=1))
    held = {peer.worker: data.draw(st.sets(st.integers(0, LAYERS - 1))) for peer in live}
    sources = sources_of(held, LAYERS, {peer.worker: peer for peer in live})
    assert (sources is None) == (set().union(*held.values()) != set(range(LAYERS)))
    if sources is None:
        return
    wanted = Grid(data.draw(st.integers(1, LAYERS)), data.draw(st.integers(1, 3)))
    plan = resplit_plan(first, wanted, spec, WorkEstimate(tuple(costs)), staying, live, Beginning(CUT, sources))
    assert grid_of(plan) == wanted
    assert plan_problems(plan) == plan_misfits(plan, spec) == []
    assert (plan.origin, plan.first_step, plan.moved) == (first.epoch + 1, CUT.step, True)
    used = {plan.at(cell).owner for cell in plan.cells()}
    assert used <= {peer.worker for peer in staying}
    assert len(used) == min(len(plan.cells()), len(staying)), "workers run several stages only if there are too few"
    after = moved_plan(plan, live, 0.5)
    assert plan_problems(after) == plan_misfits(after, spec) == []


def test_who_is_left_stays_in_its_place_and_others_fill_the_gaps() -> None:
    spec, everybody = job(4), peers(6)
    plan = initial_plan(everybody[:4], layer_ranges([1.0] * LAYERS, spec.topology), 1, spec.training, spec.redundancy)
    left = [everybody[i] for i in (3, 4, 5, 0)]
    assert [peer.worker for peer in in_places(plan, left, 4)] == ["w0", "w4", "w5", "w3"]
    assert [peer.worker for peer in in_places(plan, everybody[::-1], 4)] == ["w0", "w1", "w2", "w3", "w5", "w4"]


# the coordinator


def four_stages(**options: Any) -> Slowed:
    """Return a job of four stages whose number of stages follows the workers, with measured layers."""
    world = Slowed(4, 1, 0, chooses=("stages",), profile=protocol.Profile(costs=(1e12,) * 8), **options)
    world.train(20)
    assert len(world.plan.stages) == 4
    world.away = 1000
    return world


def wished() -> Slowed:
    """Return a job that has requested the cut for a re-split, but not made it yet."""
    world = four_stages()
    world.now += 0.9  # near the end of a step, which does not begin anew
    world.lose("w1")
    while world.state.splits.resplit is None:
        world.deliver() if world.pending else world.commit()
    return world


def at_the_cut() -> Slowed:
    """Return a job that has lost one of four workers, and has made the cut of its re-split."""
    world = wished()
    assert world.state.splits.resplit is not None
    number, step = world.state.splits.resplit.number, world.state.splits.resplit.at
    while world.state.step < step - 1:
        world.commit()
    world.commit((number, CheckpointId(step=step, id="ab12")))
    assert world.state.splits.resplit.cut == CheckpointId(step=step, id="ab12")
    return world


def hold(world: World, *workers: str) -> None:
    plan = world.plan
    assert world.state.splits.resplit is not None
    cut = world.state.splits.resplit.cut
    assert cut is not None
    for worker in workers:
        world.tell(Received(worker, held(plan, worker, cut)))


def anew() -> Slowed:
    """Return a job that lost a worker early in a step and will repeat the step on three stages to finish it sooner."""
    world = four_stages()
    world.lose("w1")
    while world.state.splits.resplit is None:
        world.deliver()
    return world


def test_a_step_begins_anew_once_where_that_is_sooner_done() -> None:
    world = anew()
    step = world.state.step
    world.settle_now()
    plan = world.plan
    assert (len(plan.stages), plan.first_step, plan.restore) == (3, step, CheckpointId(step=step, id="anew2"))
    world.lose("w2")
    world.settle_now()
    resplit = world.state.splits.resplit
    assert world.plan.origin == plan.origin
    assert resplit is None or resplit.cut is None, "after the next loss the step is completed first"


def test_a_step_whose_commit_is_on_its_way_does_not_begin_anew() -> None:
    world = anew()
    step = world.state.step
    world.pending.clear()
    world.commit()
    resplit = world.state.splits.resplit
    assert resplit is None or resplit.at == step + 1


def test_who_is_lost_while_layers_move_is_left_out_of_the_next_plan_from_the_same_cut() -> None:
    world = at_the_cut()
    hold(world, "w0", "w2", "w3")
    first = world.plan
    assert (first.reason, len(first.stages)) == ("Resplitting", 3)
    world.pending.clear()  # nobody has begun yet
    world.lose("w2")
    second = world.plan
    assert (second.reason, len(second.stages), second.origin) == ("Resplitting", 2, first.origin + 1)
    assert second.restore == first.restore
    assert second.at(Cell(0, 0)).owner == "w0"
    world.settle()
    assert (world.plan.sources, len(world.plan.stages)) == ((), 2)


def test_a_layer_that_is_lost_while_layers_move_ends_a_job_without_checkpoints() -> None:
    world = at_the_cut()
    hold(world, "w0", "w2", "w3")
    world.pending.clear()
    for worker in ("w0", "w2"):
        world.lose(worker)
    assert world.finish is None  # others may have got copies meanwhile: they are asked
    for _ in range(40):
        world.now += 1.0
        world.tell(Received("w3", protocol.Heartbeat(step=0)))
        world.tell(Tick())
    assert (world.end.outcome, world.end.reason) == (Outcome.UNRECOVERABLE, "StageLost")


def test_a_restarted_coordinator_hears_of_the_cut_from_the_workers() -> None:
    world = at_the_cut()
    cut = world.state.splits.resplit and world.state.splits.resplit.cut
    assert cut is not None
    plan = world.plan
    world.pending.clear()
    world.state = coordinator.initial(world.spec, world.document, secret="", now=world.now, resumed=True)
    for worker in ("w0", "w2", "w3"):
        back(world, worker, plan)
        world.tell(Received(worker, protocol.StateHeld(checkpoint=cut, layers=tuple(range(8)))))
    world.settle()
    assert (len(world.plan.stages), world.plan.restore) == (3, cut)


def test_a_notice_is_more_urgent_than_a_cut_that_is_asked_for() -> None:
    world = wished()
    world.tell(PreemptionNotice("w2", 600.0))
    assert world.state.splits.resplit is None
    asked = [message for _, message in world.sent if isinstance(message, protocol.TakeCheckpoint)]
    assert [message.hold for message in asked] == [True, False]
    assert asked[1].number > asked[0].number
    assert asked[1].at > world.spec.training.steps, "the root does not fulfil it"
    world.settle()
    assert world.plans[-1].owned_by("w2") == []


def test_who_is_cut_off_for_a_moment_is_waited_for() -> None:
    world = at_the_cut()
    hold(world, "w2", "w3")
    world.tell(ChannelClosed("w2"))
    hold(world, "w0")
    assert world.plan.reason != "Resplitting"


SIZES = [1.0] * LAYERS


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
    """Workers lack no more layers if each stage goes to a worker that holds many of its layers. in_order, by_layers:
    the most layers that one worker lacks, and the sum over all, with stages in order and by held layers.
    """
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
    there = peers(18, zones, nodes)
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
    """Before two pipelines become one of six stages, spare workers replicate the stages that they will mostly need."""
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
