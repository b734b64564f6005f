"""Checkpoint and restart, and job morphing."""

import pytest

from bamboo.simulation.strategies.policies.restarting import Restarting
from bamboo.simulation.strategies.policy import Saving
from bamboo_core.planning.splits.resplit import Grid
from strategy_kit import COSTS, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


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


def test_torchrun_begins_anew_for_every_node_that_comes() -> None:
    """c is of no use to one pipeline of two stages; from 100 to 130 s nobody trains, and 10 s are done again."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    changes = ((0.0, "a b", ""), (100.0, "c", ""))
    at_once = Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9, at_every_change=True)
    found = run(at_once, *changes, duration=200)
    assert found.samples == pytest.approx((60 + 70) * 8 / 18)
    patient = run(Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9), *changes, duration=200)
    assert patient.samples == pytest.approx(170 * 8 / 18)


def test_a_fixed_grid_waits_until_a_lost_node_is_replaced() -> None:
    """From 30 s 0.8 samples/s on 2x2; b is lost at 100 s, and e comes at 150 s; 60 of 70 s were safe."""
    saving = Saving(every=20.0, pause=0.0, delay=5.0)
    policy = Restarting(costs=COSTS, choices=(2,), saving=saving, mtbf=1e9, fixed=Grid(2, 2))
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), (150, "e", ""), duration=300)
    assert found.samples == pytest.approx((60 + 120) * 0.8)
    assert (found.redone, found.stalled, found.idle) == pytest.approx((10, 60, 50))
    spare = run(policy, (0, "a b c d e", ""), (100, "", "b"), duration=300)
    assert spare.samples == pytest.approx((60 + 165) * 0.8)
