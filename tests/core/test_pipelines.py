"""Forwards and backwards of a step in virtual time, compared with formulas of 1F1B and ZB-H1."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.profile import Network
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.steps.pipelines import Group, StepLoss, execute

FAST = Network(flow=1e15, machine=1e15, latency=0.0)


def group(stages: int, microbatches: int, **changes: Any) -> Group:
    """Return a pipeline with forwards of 1 s, backwards of 2 s and empty tensors. changes: fields to replace."""
    made = Group(
        forward=(1.0,) * stages,
        backward=(2.0,) * stages,
        boundary=(0,) * stages,
        owners=(tuple(range(stages)),),
        microbatches=(microbatches,),
        order=StageOrder(),
        network=FAST,
        busy=(0.0,) * stages,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (4, 8), (3, 2)])
def test_a_balanced_pipeline_only_fills_and_drains(stages: int, microbatches: int) -> None:
    times = execute(group(stages, microbatches))
    assert times.end == 3 * (microbatches + stages - 1)
    assert times.work == (3.0 * microbatches,) * stages


def test_one_microbatch_ahead_hides_the_way_to_the_neighbour() -> None:
    """Only the fill and drain of the pipeline wait for transfers of half a second."""
    slow = Network(flow=1e15, machine=1e15, latency=0.5)
    assert execute(group(4, 8, network=slow)).end == pytest.approx(11 * 3 + 6 * 0.5)


def test_the_longest_stage_sets_the_pace() -> None:
    """The slowest stage takes 6 s per microbatch, begins after a forward of 1 s, and ends before a backward of 2 s."""
    times = execute(group(3, 10, forward=(1.0, 2.0, 1.0), backward=(2.0, 4.0, 2.0)))
    assert times.end == 1 + 10 * 6 + 2


def test_a_small_connection_sends_one_tensor_after_the_other() -> None:
    """Tensors queue on a slow connection: microbatches follow each other every 10 s instead of every 3 s."""
    thin = Network(flow=10.0, machine=1e15, latency=0.0)
    times = execute(group(2, 10, boundary=(100, 0), network=thin))
    assert times.end == pytest.approx(10 * 10 + 1 + 3 + 10 + 2)


def test_the_work_of_a_lost_worker_is_done_again() -> None:
    """The neighbour of a worker that is lost at 10 s repeats all the worker's microbatches from 11 s on."""
    calm = execute(group(4, 8)).end
    lost = StepLoss(lost=((2, 10.0),), planned=11.0, runs=(((0, 2), ((0, 8, 1),)),))
    disturbed = execute(group(4, 8), lost)
    assert disturbed.work[1] == 48.0
    assert calm < disturbed.end <= 11 + 48 + 3


def test_what_two_lost_neighbours_sent_each_other_is_made_again() -> None:
    lost = StepLoss(lost=((1, 20.0), (2, 20.0)), planned=21.0, runs=(((0, 1), ((0, 8, 0),)), ((0, 2), ((0, 8, 0),))))
    times = execute(group(4, 8), lost)
    assert times.work[0] == 3 * 8 * 3


ZBH1 = PipelineSchedule.ZB_H1


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (4, 8), (2, 2), (8, 16)])
def test_split_backwards_leave_a_third_of_the_bubble(stages: int, microbatches: int) -> None:
    """Each stage but one adds 1 s of bubble instead of 1F1B's 3 s. A forward and each half of a backward take 1 s."""
    times = execute(group(stages, microbatches, order=StageOrder(ZBH1)))
    assert times.end == 3 * microbatches + stages - 1
    assert times.work == (3.0 * microbatches,) * stages


def test_an_heir_repeats_weight_gradients_last() -> None:
    """After a loss, a step with split backwards ends earlier than one with whole backwards, with the same work."""
    lost = StepLoss(lost=((2, 10.0),), planned=11.0, runs=(((0, 2), ((0, 8, 1),)),))
    whole, split = execute(group(4, 8), lost), execute(group(4, 8, order=StageOrder(ZBH1)), lost)
    assert split.work[1] == whole.work[1]
    assert split.end < whole.end


def four_pipelines(microbatches: int) -> Group:
    """Return four pipelines of four stages, each cell with a worker of its own."""
    owners = tuple(tuple(range(4 * d, 4 * d + 4)) for d in range(4))
    return replace(group(4, microbatches, owners=owners, busy=(0.0,) * 16), microbatches=(microbatches,) * 4)


def test_the_owners_of_a_stage_share_what_a_lost_one_ran() -> None:
    """Four workers share a lost cell's microbatches, so a loss adds less than 35 % of a step on average."""
    one = four_pipelines(32)
    calm, extra = execute(one).end, list[float]()
    for stage, tenth in itertools.product(range(4), range(10)):
        at, runners = (tenth + 0.5) * calm / 10, ((stage - 1) % 4, 4 + stage, 8 + stage, 12 + stage)
        shared = tuple((8 * i, 8 * i + 8, worker) for i, worker in enumerate(runners))
        lost = StepLoss(lost=((stage, at),), planned=at, runs=(((0, stage), shared),))
        extra.append(execute(one, lost).end / calm - 1)
    assert sum(extra) / len(extra) < 0.35
    assert max(extra) < 0.55


@pytest.mark.parametrize("pipelines", [1, 4])
def test_a_keeper_does_not_repeat_finished_groups(pipelines: int) -> None:
    """If the heir has sums of finished groups, a loss adds under 55 % of a step on average, under 25 % near its end."""
    one = four_pipelines(32) if pipelines == 4 else group(4, 32)
    calm, extra = execute(one).end, list[float]()
    for stage, tenth in itertools.product(range(4), range(10)):
        at, heir = (tenth + 0.5) * calm / 10, (stage - 1) % 4
        lost = StepLoss(lost=((stage, at),), planned=at, runs=(((0, stage), ((0, 32, heir),)),))
        kept = replace(lost, kept=(((0, stage), (heir, tuple(range(4, 32, 4)), 0.0)),))
        again, less = execute(one, lost), execute(one, kept)
        assert less.work[heir] <= again.work[heir]
        assert (again.work[heir] - less.work[heir]) % 12 == 0  # whole groups
        extra.append(less.end / calm - 1)
    assert sum(extra) / len(extra) < 0.55
    assert max(extra[9::10]) < 0.25


def test_nobody_runs_a_portion_whose_sum_the_owner_has() -> None:
    """If the owner has a portion's sum, no worker runs that portion again after the loss of the worker that ran it."""
    one = group(3, 8, busy=(0.0,) * 6)
    shared = ((0, 4, 0), (4, 6, 4), (6, 8, 3))
    first = StepLoss(lost=((1, 1.0),), planned=1.0, runs=(((0, 1), shared),))
    done = execute(one, first)
    at = done.end - 1.0
    again = StepLoss(lost=((4, at),), planned=at, runs=(((0, 1), ((0, 4, 0), (4, 6, 5), (6, 8, 3))),))
    kept = replace(again, kept=(((0, 1), (0, (), 0.0)),))
    assert (done.work[4], execute(one, first, again).work[5], execute(one, first, kept).work[5]) == (6.0, 6.0, 0.0)


def test_what_a_keeper_gave_is_run_after_all_when_the_stage_behind_is_lost() -> None:
    """If the next stage is lost, too, the heir also runs the microbatches whose gradient sums a keeper gave it."""
    first = StepLoss(
        lost=((1, 20.0),), planned=20.0, runs=(((0, 1), ((0, 4, 0), (4, 8, 3))),), kept=(((0, 1), (0, (2,), 0.0)),)
    )
    runs = ((0, 1), ((0, 4, 0), (4, 8, 0))), ((0, 2), ((0, 8, 0),))
    second = StepLoss(lost=((2, 24.0), (3, 24.0)), planned=24.0, runs=runs)
    one = group(3, 8, busy=(0.0,) * 4)
    assert execute(one, first).end < 24 + 2 * 8 * 3 < execute(one, first, second).end < 24 + 3 * 8 * 3


@given(st.data())
def test_whoever_runs_which_microbatches_the_step_ends(data: st.DataObject) -> None:
    """A step ends without a deadlock, whichever workers share the microbatches of several cells."""
    draw, microbatches = data.draw, data.draw(st.integers(1, 12))
    one = four_pipelines(microbatches)
    runs = []
    for place in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True, max_size=4)):
        ends = sorted({*draw(st.lists(st.integers(1, microbatches), max_size=4)), microbatches})
        parts = zip([0, *ends], ends, strict=False)
        runs.append((place, tuple((first, end, draw(st.integers(0, 15))) for first, end in parts)))
    order = StageOrder(draw(st.sampled_from(PipelineSchedule)))
    begun = replace(one, runs=tuple(runs[:3]), order=order)
    calm = execute(begun)
    assert sum(calm.work) == pytest.approx(3 * 16 * microbatches)
    taken = StepLoss(lost=(), planned=draw(st.floats(0, calm.end)), runs=tuple(runs[3:]))
    assert execute(begun, taken).end > 0
