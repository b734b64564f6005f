"""Short runs of each published policy, computed by hand: restarts, memory checkpoints, quorum, rerouting, templates."""

import pytest

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import SNAPSHOT_BYTES
from strategies.memory_checkpoints import OVERHEAD, MemoryCheckpoints
from strategies.policy import Saving, View, blocking, pays, young_daly
from strategies.quorum import Quorum
from strategies.rerouting import Rerouting
from strategies.restarting import Restarting
from strategies.templates import Templates
from strategy_kit import COSTS, DETECTION, REGROUP, RENDEZVOUS, costs_of, profile, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


def test_restarts_do_the_work_since_the_checkpoint_again() -> None:
    """On a 2x2 grid the job trains 0.8 samples/s from 30 s on. At 100 s it loses b; checkpoints hold 60 of its 70 s of
    training. 35 s later it goes on with one pipeline, at 8/18 samples/s.
    """
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    policy = Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9)
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(60 * 0.8 + 65 * 8 / 18)
    assert (found.redone, found.stalled, found.productive) == pytest.approx((10, 65, 125))


def test_restarts_grow_right_after_a_checkpoint_if_that_pays() -> None:
    """The job takes c and d at 115 s, when the checkpoint of 110 s is safe; it never does with a loss every 40 s."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    changes = ((0.0, "a b", ""), (95.0, "c d", ""))
    found = run(Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9), *changes, duration=200)
    assert found.samples == pytest.approx(80 * 8 / 18 + (200 - 145) * 0.8)
    assert found.redone == pytest.approx(5)
    often = run(Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=40.0), *changes, duration=200)
    assert often.samples == pytest.approx(170 * 8 / 18)


def test_morphing_chooses_the_stages_anew() -> None:
    """With 3 nodes and 4 layers of a second each, a step takes 3 x 4 s on three pipelines of one stage, but
    (8 + 2) x 2 s on one pipeline of three stages, of which one has two layers.
    """
    policy = Restarting(costs=COSTS, choices=(1, 2, 3), saving=NEVER, mtbf=1e9)
    found = run(policy, (0, "a b c", ""), duration=130)
    assert found.samples == pytest.approx(100 * 8 / 12)


def test_torchrun_begins_anew_for_every_node_that_comes() -> None:
    """A pipeline of two stages has no use for c; still torchrun stops it for 30 s, and repeats 10 s of training."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    changes = ((0.0, "a b", ""), (100.0, "c", ""))
    at_once = Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9, at_every_change=True)
    found = run(at_once, *changes, duration=200)
    assert found.samples == pytest.approx((60 + 70) * 8 / 18)
    patient = run(Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9), *changes, duration=200)
    assert patient.samples == pytest.approx(170 * 8 / 18)


def test_a_fixed_grid_waits_until_a_lost_node_is_replaced() -> None:
    """The job trains 0.8 samples/s from 30 s on. It loses b at 100 s, with 60 of 70 s safe, and waits for e."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    policy = Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9, fixed=Grid(2, 2))
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), (150, "e", ""), duration=300)
    assert found.samples == pytest.approx((60 + 120) * 0.8)
    assert (found.redone, found.stalled, found.idle) == pytest.approx((10, 60, 50))
    spare = run(policy, (0, "a b c d e", ""), (100, "", "b"), duration=300)
    assert spare.samples == pytest.approx((60 + 165) * 0.8)


def test_memory_checkpoints_replay_a_window_with_a_spare_node() -> None:
    """In a window, two steps of 18 s, a stage's 20 bytes are copied at 0.6 bytes/s. A replay repeats 1.5 windows."""
    costs = costs_of(profile(state=10, flow=0.6, memory=10**6), 8)
    policy = MemoryCheckpoints(costs=costs, stages=2, saving=NEVER)
    assert policy.window(Grid(2, 1)) == 2
    start, again = costs.restart(2), DETECTION + costs.regroup(2) + 1.5 * 2 * 16
    found = run(policy, (0, "a b c", ""), (200, "", "b"), duration=400)
    assert found.stalled == pytest.approx(start + again)
    assert found.samples == pytest.approx((400 - start - again) * 8 / 18 / (1 + OVERHEAD))
    waiting = run(policy, (0, "a b", ""), (200, "", "b"), duration=400)
    assert waiting.idle == pytest.approx(200)


def test_a_quorum_goes_on_without_the_replica_that_lost_a_node() -> None:
    """Spare e completes b's pipeline, which returns after detection, a regroup, a rendezvous and a second regroup."""
    policy = Quorum(costs=COSTS, grid=Grid(2, 2), saving=NEVER)
    found = run(policy, (0, "a b c d e", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(70 * 0.8 - 4 + RENDEZVOUS * 0.4 + (200 - 151) * 0.8)
    assert found.stalled == pytest.approx(30 + DETECTION + REGROUP + REGROUP)


def test_rerouting_gives_microbatches_to_the_peers() -> None:
    """Without b, its only peer runs all 8 microbatches, 2 s each, after one forward of the first stage."""
    lost = COSTS.rerouted(Grid(2, 2), 1)
    assert 16 < lost < 18
    policy = Rerouting(costs=COSTS, stages=2, saving=NEVER)
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(70 * 0.8 - 4 + 95 * 8 / lost)
    back = run(policy, (0, "a b c d", ""), (100, "", "b"), (150, "e", ""), duration=200)
    assert back.samples == pytest.approx(70 * 0.8 - 4 + 45 * 8 / lost + 42 * 0.8)


def test_rerouting_goes_back_if_a_stage_has_nobody_left() -> None:
    found = run(Rerouting(costs=COSTS, stages=2, saving=NEVER), (0, "a b c d", ""), (100, "", "b d"), duration=200)
    assert (found.samples, found.redone) == pytest.approx((65 * 8 / 18, 70))


def test_templates_use_all_nodes_and_lose_the_step() -> None:
    """After detection (5 s) and regroup (8 s), pipelines of 3 and 2 nodes become two of 2. Half a step is lost."""
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


def test_templates_whose_nodes_lack_memory_are_none() -> None:
    """A node holds two of four layers, so three nodes form one pipeline of three, and one node forms none."""
    policy = Templates(
        costs=costs_of(profile(state=400), 8), shortest=1, longest=4, tolerated=0, saving=NEVER, mtbf=1e9
    )
    assert [len(policy.react((), View(now=0.0, ready=ready))[0]) for ready in (("a",), ("a", "b", "c"))] == [0, 1]


def test_a_blocking_checkpoint_pauses_until_it_is_stored() -> None:
    """A blocking checkpoint of 3 GB at 1 GB/s pauses training for three seconds; the copy to memory takes only one."""
    costs = costs_of(profile(state=int(SNAPSHOT_BYTES), flow=1e9, memory=10**11), 8)
    saving = blocking(costs, 4, 600.0)
    assert (saving.every, saving.pause, saving.delay) == pytest.approx((60.0, 3.0, 0.0))


def test_checkpoints_by_young_and_daly() -> None:
    costs = costs_of(profile(state=int(SNAPSHOT_BYTES), flow=1e9, memory=10**11), 8)
    saving = young_daly(costs, 4, 200.0)
    assert (saving.every, saving.pause, saving.delay) == pytest.approx((20.0, 1.0, 3.0))
    assert young_daly(costs, 1, 1.0).every == pytest.approx(12.0)  # not more often than it can be written
    assert pays(1.0, 2.0, 10.0, 21.0)
    assert not pays(1.0, 2.0, 10.0, 19.0)
