"""Published strategies under one set of assumptions: each policy by hand, and what holds for all of them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.planning.splits.resplit import Grid
from bamboo.profiles.files import read_profile
from bamboo.profiles.profile import (
    SOURCES,
    Layer,
    Machine,
    ModelProfile,
    Network,
    Prices,
    Source,
    Storage,
    Times,
)
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.strategies.choose import (
    ON_DEMAND,
    SPOT,
    STRATEGIES,
    Workplace,
    calibrated,
    strategy_result,
    workplace,
)
from bamboo.simulation.strategies.costs import SNAPSHOT_BYTES, Costs
from bamboo.simulation.strategies.drive import StrategyResult, drive
from bamboo.simulation.strategies.policies.memory_checkpoints import OVERHEAD, MemoryCheckpoints
from bamboo.simulation.strategies.policies.quorum import Quorum
from bamboo.simulation.strategies.policies.redundancy import HEAL_STEPS, Redundancy
from bamboo.simulation.strategies.policies.rerouting import Rerouting
from bamboo.simulation.strategies.policies.restarting import Restarting
from bamboo.simulation.strategies.policies.templates import Templates
from bamboo.simulation.strategies.policy import Policy, Saving
from bamboo.simulation.strategies.saving import pays, young_daly
from bamboo.simulation.strategies.timeline import NodesChange, Timeline, timeline
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Change, NodeChange, PriceChange, make_trace

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)
START, DETECTION, RENDEZVOUS, REGROUP = 10.0, 5.0, 30.0, 8.0
FREE = 1e15  # a network that takes no time


def profile(layers: int = 4, *, state: int = 0, flow: float = FREE, memory: int = 1000) -> ModelProfile:
    """Each layer takes a second of a microbatch, and nothing else takes any time unless it is asked for."""
    layer = Layer(forward=0.25, backward=0.75, parameters=state, optimizer=0, gradients=0, boundary=0, activations=0)
    return ModelProfile(
        name="made-up", device="none", samples=1, layers=(layer,) * layers,
        network=Network(flow=flow, machine=flow), storage=Storage(write=flow, read=flow),
        times=Times(start=START, detection=DETECTION, rendezvous=RENDEZVOUS, regroup=REGROUP),
        machine=Machine(memory=memory), prices=Prices(spot=1.0, on_demand=3.0),
        sources={name: Source(text="made up") for name in (*SOURCES, "prices")},
    )  # fmt: skip


def nodes(*changes: tuple[float, str, str], duration: float) -> Timeline:
    """(seconds, joined, lost), the nodes' names with spaces."""
    return Timeline(
        duration=duration, node_seconds=duration, usd=1.0, removed=0,
        changes=tuple(NodesChange(at=at, joined=tuple(j.split()), lost=tuple(g.split())) for at, j, g in changes),
    )  # fmt: skip


def run(policy: Policy, *changes: tuple[float, str, str], duration: float) -> StrategyResult:
    found = drive(policy, nodes(*changes, duration=duration))
    spent = found.productive + found.redone + found.stalled + found.idle + found.saving
    assert spent == pytest.approx(duration)
    return found


COSTS = Costs(profile(), 8)  # 4 layers of 1 s, 8 microbatches of one sample


def test_a_step_is_a_pipelines_fill_and_its_microbatches() -> None:
    """1x2: (8 + 1) x 2 s; 2x2: (4 + 1) x 2 s; a doubled stage does 4 x 2 microbatches; 3 pipelines: ceil(8/3)."""
    assert [COSTS.step(Grid(2, count)) for count in (1, 2, 3)] == pytest.approx([18, 10, 8])
    assert COSTS.step(Grid(2, 2), 2.0) == pytest.approx(8 * 2 + 2)
    assert COSTS.rate(Grid(0, 0)) == 0


def test_pipelines_of_different_length_end_together() -> None:
    """4 stages of 1 s and 2 of 2 s: of 8 microbatches 5 and 3 end after 8 s both."""
    assert COSTS.uneven((4, 2)) == pytest.approx(8)
    assert COSTS.uneven((2, 2)) == pytest.approx(COSTS.step(Grid(2, 2)))


def test_what_the_network_carries_is_part_of_a_step() -> None:
    """2 pipelines of one stage: each sends and receives 2 x 1/2 of 400 bytes of gradients at 100 bytes a second."""
    layer = profile().layers[0]
    from msgspec.structs import replace

    layers = (replace(layer, gradients=100),) * 4
    costs = Costs(replace(profile(flow=100.0), layers=layers), 8)
    assert costs.step(Grid(1, 2)) == pytest.approx(4 * 4 + 4)
    assert costs.step(Grid(4, 1), replicas=True) == pytest.approx(11)
    assert Costs(replace(profile(flow=5.0), layers=layers), 8).step(Grid(4, 1), replicas=True) == pytest.approx(100 / 5)


def test_the_memory_of_a_device_bounds_the_stages() -> None:
    costs = Costs(profile(state=400), 8)
    assert (costs.least_stages(), costs.least_stages(2)) == (2, 4)
    assert Costs(profile(state=2000), 8).least_stages() is None


def test_checkpoints_by_young_and_daly() -> None:
    costs = Costs(profile(state=int(SNAPSHOT_BYTES), flow=1e9, memory=10**11), 8)
    saving = young_daly(costs, 4, 200.0)
    assert (saving.every, saving.pause, saving.delay) == pytest.approx((20.0, 1.0, 3.0))
    assert young_daly(costs, 1, 1.0).every == pytest.approx(12.0)  # not more often than it can be written
    assert pays(1.0, 2.0, 10.0, 21.0)
    assert not pays(1.0, 2.0, 10.0, 19.0)


def test_nodes_are_held_up_to_the_capacity_and_paid_while_they_are_held() -> None:
    """c is taken at 100 s in place of a; b is gone before it is ready again as d."""
    changes = [
        NodeChange(at=at, change=change, node=node)
        for at, change, node in (
            (0.0, Change.ADD, "a"), (0.0, Change.ADD, "b"), (50.0, Change.ADD, "c"), (100.0, Change.REMOVE, "a"),
            (200.0, Change.REMOVE, "b"), (300.0, Change.ADD, "d"), (305.0, Change.REMOVE, "d"),
        )
    ]  # fmt: skip
    found = timeline(make_trace(changes, duration=400.0), capacity=2, start=10.0, usd_per_hour=3600.0)
    assert [(one.at, one.joined, one.lost) for one in found.changes] == [
        (10.0, ("a", "b"), ()), (100.0, (), ("a",)), (110.0, ("c",), ()), (200.0, (), ("b",)),
    ]  # fmt: skip
    assert (found.node_seconds, found.usd, found.removed) == pytest.approx((605.0, 605.0, 3))
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=3600.0), PriceChange(at=150.0, zone="", usd_per_hour=7200.0)]
    priced = timeline(make_trace(changes, prices, duration=400.0), capacity=2, start=10.0, usd_per_hour=0.0)
    assert priced.usd == pytest.approx(605.0 + 50 + 250 + 5)


def test_restarts_do_the_work_since_the_checkpoint_again() -> None:
    """From 30 s 0.8 samples/s on 2x2. At 100 s b is lost: 70 s were trained, 60 of them are safe; 35 s later there is
    one pipeline, 8/18 samples/s."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    policy = Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9)
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(60 * 0.8 + 65 * 8 / 18)
    assert (found.redone, found.stalled, found.productive) == pytest.approx((10, 65, 125))


def test_restarts_grow_right_after_a_checkpoint_if_that_pays() -> None:
    """c and d come at 90 s, 60 s of training; the checkpoint at 80 s of training, 110 s, is safe at 115 s."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    changes = ((0.0, "a b", ""), (95.0, "c d", ""))
    found = run(Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9), *changes, duration=200)
    assert found.samples == pytest.approx(80 * 8 / 18 + (200 - 145) * 0.8)
    assert found.redone == pytest.approx(5)
    often = run(Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=40.0), *changes, duration=200)
    assert often.samples == pytest.approx(170 * 8 / 18)


def test_morphing_chooses_the_stages_anew() -> None:
    """Of 3 nodes 3x1 with 1 to 2 s stages is (3 x 4) s a step; 1x3 has (8 + 2) x 2; so three pipelines of one stage."""
    policy = Restarting(costs=COSTS, choices=(1, 2, 3), saving=NEVER, mtbf=1e9)
    found = run(policy, (0, "a b c", ""), duration=130)
    assert found.samples == pytest.approx(100 * 8 / 12)


def test_templates_use_all_nodes_and_lose_the_step() -> None:
    """5 nodes as 3 + 2; then 2 + 2 after 5 + 8 s, without the half step that was done."""
    policy = Templates(costs=COSTS, shortest=2, longest=4, tolerated=1, saving=NEVER, mtbf=1e9)
    found = run(policy, (0, "a b c d e", ""), (100, "", "c"), duration=200)
    before = 8 / min(COSTS.uneven((3, 2)), COSTS.uneven((2, 2)))
    assert found.samples == pytest.approx(70 * before - 4 + 87 * 0.8)


def test_templates_go_back_if_a_layer_has_no_copy_left() -> None:
    policy = Templates(costs=COSTS, shortest=1, longest=2, tolerated=1, saving=NEVER, mtbf=1e9)
    first = (0.0, "a b c d", "")
    kept = run(policy, first, (100.0, "", "a c"), duration=100 + 5 + 8)
    assert kept.redone < 10  # four pipelines of one stage: every node has all layers
    pairs = Templates(costs=COSTS, shortest=2, longest=2, tolerated=1, saving=NEVER, mtbf=1e9)
    gone = run(pairs, first, (100.0, "e f", "a c"), duration=200)
    assert (gone.redone, gone.samples) == pytest.approx((70, 65 * 0.8))


def test_rerouting_gives_microbatches_to_the_peers() -> None:
    """2 pipelines of 2 stages: without b the other second stage does 8 microbatches of 2 s and a third of the fill."""
    policy = Rerouting(costs=COSTS, stages=2, saving=NEVER)
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(70 * 0.8 - 4 + 95 * 8 / (16 + 2 / 3))
    back = run(policy, (0, "a b c d", ""), (100, "", "b"), (150, "e", ""), duration=200)
    assert back.samples == pytest.approx(70 * 0.8 - 4 + 45 * 8 / (16 + 2 / 3) + 42 * 0.8)


def test_rerouting_goes_back_if_a_stage_has_nobody_left() -> None:
    found = run(Rerouting(costs=COSTS, stages=2, saving=NEVER), (0, "a b c d", ""), (100, "", "b d"), duration=200)
    assert (found.samples, found.redone) == pytest.approx((65 * 8 / 18, 70))


def test_memory_checkpoints_replay_a_window_with_a_spare_node() -> None:
    """A stage's 20 bytes need 2 steps of 18 s at 0.6 bytes/s: a window of 2; 1.5 of them are replayed, 16 s a step."""
    costs = Costs(profile(state=10, flow=0.6, memory=10**6), 8)
    policy = MemoryCheckpoints(costs=costs, stages=2, saving=NEVER)
    assert policy.window(Grid(2, 1)) == 2
    start, again = costs.restart(2), DETECTION + costs.regroup(2) + 1.5 * 2 * 16
    found = run(policy, (0, "a b c", ""), (200, "", "b"), duration=400)
    assert found.stalled == pytest.approx(start + again)
    assert found.samples == pytest.approx((400 - start - again) * 8 / 18 / (1 + OVERHEAD))
    waiting = run(policy, (0, "a b", ""), (200, "", "b"), duration=400)
    assert waiting.idle == pytest.approx(200)


def test_a_quorum_goes_on_without_the_replica_that_lost_a_node() -> None:
    """b's replica is lost; with e it comes back after the detection and a regroup, a rendezvous, and a last regroup."""
    policy = Quorum(costs=COSTS, grid=Grid(2, 2), saving=NEVER)
    found = run(policy, (0, "a b c d e", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(70 * 0.8 - 4 + RENDEZVOUS * 0.4 + (200 - 151) * 0.8)
    assert found.stalled == pytest.approx(30 + DETECTION + REGROUP + REGROUP)


def redundancy(choices: Sequence[int] = (2,), *, replicas: bool = True, costs: Costs = COSTS) -> Redundancy:
    return Redundancy(costs=costs, choices=tuple(choices), replicas=replicas, saving=NEVER, mtbf=1e9)


def test_a_neighbour_takes_over_and_no_sample_is_done_again() -> None:
    """One pipeline of two stages: without b, a does both, 8 x 2 x 2 + 2 s a step, after 5 s and half of a stage's step;
    with c from 150 s it is a grid again, after 0.43 steps."""
    first, lost = (0.0, "a b", ""), (100.0, "", "b")
    found = run(redundancy(), first, lost, duration=200)
    assert (found.redone, found.stalled) == pytest.approx((0, 30 + DETECTION + 8))
    assert found.samples == pytest.approx(70 * 8 / 18 + 87 * 8 / 34)
    healed = run(redundancy(), first, lost, (150.0, "c", ""), duration=200)
    assert healed.samples == pytest.approx(70 * 8 / 18 + 37 * 8 / 34 + (50 - HEAL_STEPS * 18) * 8 / 18)


def test_two_neighbours_at_once_need_a_peer_in_another_pipeline() -> None:
    alone = run(redundancy((4,)), (0, "a b c d", ""), (100, "e f", "b c"), duration=200)
    assert alone.redone == pytest.approx(70)
    peers = run(redundancy(), (0, "a b c d", ""), (100, "", "a b"), duration=200)
    assert peers.redone == 0
    without = run(redundancy(replicas=False), (0, "a b", ""), (100, "c", "b"), duration=200)
    assert without.redone == pytest.approx(70)


def test_a_replica_that_is_being_filled_does_not_help_yet() -> None:
    """b's stage is with a alone until c has a copy, after 5 + 10 s; to lose a in that time is fatal, later not."""
    costs = Costs(profile(state=10, flow=2.0, memory=10**6), 8)
    for at, redone in ((112.0, True), (150.0, False)):
        changes = ((0.0, "a b c", ""), (100.0, "", "b"), (at, "d e", "a"))
        found = run(redundancy((3,), costs=costs), *changes, duration=300)
        assert bool(found.redone) is redone


def test_layers_are_split_anew_for_whoever_is_left_if_that_is_faster() -> None:
    """12 layers on 4 stages of 3 s: a doubled one makes 57 s of 33; 3 stages of 4 s take 40, after 0.6 steps. Of 4
    layers a doubled stage makes 19 s of 11, and 3 stages, of which one has two layers, would take 20.
    """
    changes = ((0.0, "a b c d", ""), (100.0, "", "b"))
    split = run(redundancy((3, 4), costs=Costs(profile(12), 8)), *changes, duration=200)
    assert split.samples == pytest.approx(70 * 8 / 33 + (100 - DETECTION - 12 - 24) * 8 / 40)
    stays = run(redundancy((3, 4)), *changes, duration=200)
    assert stays.samples == pytest.approx(70 * 8 / 11 + (100 - DETECTION - 4) * 8 / 19)


@pytest.fixture(scope="module")
def place() -> Workplace:
    return workplace(read_profile("vgg-v100"))


def made(place: Workplace, rate: float, seed: int = 1, hours: float = 8.0) -> Any:
    return generate(Generation(nodes=place.nodes, hours=hours, removal=rate, addition=0.5), seed)


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_preemptions_all_lose_only_their_start(place: Workplace, name: str) -> None:
    found = strategy_result(name, place, made(place, 0.0))
    assert found.goodput > 0.985
    assert (found.redone, found.preemptions) == (0, 0)


@pytest.mark.parametrize("name", SPOT)
def test_more_preemptions_never_train_more(place: Workplace, name: str) -> None:
    found = [strategy_result(name, place, made(place, rate, hours=4.0)).throughput for rate in (0.0, 0.2, 0.8)]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.9 * found[0]


def test_on_demand_nodes_have_the_published_step(place: Workplace) -> None:
    """The published grid takes its published time; another one of as many nodes may be faster."""
    published = place.costs.profile.published
    assert published is not None
    grid = Grid(published.on_demand_stages, published.on_demand_pipelines)
    assert place.costs.step(grid) == pytest.approx(published.on_demand_seconds, rel=1e-3)
    found = strategy_result(ON_DEMAND, place, made(place, 0.3))
    assert found.throughput >= 0.999 * published.batch / published.on_demand_seconds
    assert found.usd_per_hour <= 3.06 * place.on_demand_nodes + 1e-6
    assert calibrated(profile()) == profile()


def test_what_cannot_be_compared_is_named(place: Workplace) -> None:
    with pytest.raises(SimulationError, match="made-up: it says nothing of what was published"):
        workplace(profile())
    from msgspec.structs import replace

    known = workplace(profile(), batch=8, nodes=4)
    free = workplace(replace(profile(), prices=None), batch=8, nodes=4)
    with pytest.raises(SimulationError, match="a profile without prices"):
        strategy_result("bamboo", free, made(known, 0.1))
    with pytest.raises(SimulationError, match="the trace: expected nodes that come and go"):
        strategy_result("bamboo", known, make_trace())
    node = NodeChange(at=0.0, change=Change.ADD, node="a")
    priced = make_trace([node], [PriceChange(at=0.0, zone="zone-a", usd_per_hour=1.0)], duration=100.0)
    with pytest.raises(SimulationError, match="prices for zone-a, and none for nodes that say no zone"):
        strategy_result("bamboo", known, priced)
    huge = workplace(profile(state=5000), batch=8, nodes=4)
    assert strategy_result("checkpoint", huge, made(huge, 0.1)).samples == 0


def test_the_command() -> None:
    def called(*arguments: str) -> Any:
        flags = ["simulate", "--seeds", "1", "--hours", "2", "--preempt-rate", "0.3", *arguments]
        return CliRunner().invoke(app, flags)

    done = called("--strategy", "bamboo", "--strategy", "checkpoint", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["case"] for one in found] == ["0.3 bamboo", "0.3 checkpoint"]
    assert found[0]["mean"]["goodput"] > found[1]["mean"]["goodput"] > 0
    assert called("--strategy", "bamboo", "--workload", "vgg").stdout.count("\n") == 2
    for arguments, problem in (
        (("--strategy", "x"), "--strategy must be one of on-demand, checkpoint"),
        (("--strategy", "all", "--steps", "5"), "--steps: cannot be combined with --strategy"),
        (("job.yaml", "--strategy", "all"), "--strategy: expected no job"),
        (("--strategy", "all", "--workload", "x"), "cannot read the profile x-v100"),
    ):
        refused = called(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert problem in refused.stderr
