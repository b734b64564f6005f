"""Step times: values of 1F1B worked out by hand, and properties that hold for any plan."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.plan import Assignment, Cell, Plan
from bamboo_core.planning.profile import ModelProfile, Network
from bamboo_core.planning.steps.step_times import StepModel
from job_simulation_kit import plan_of, profile, spec


def seconds(job: JobSpec, model: ModelProfile) -> float:
    plan = plan_of(job, len(model.layers))
    return StepModel(model.figures, job).seconds(plan, plan.target)


def test_a_step_is_the_pipeline_then_the_reduction_over_pipelines() -> None:
    assert seconds(spec(2, 1, 8, "None"), profile(4)) == pytest.approx(6 * 9)
    thin = Network(flow=100.0, machine=1e15, latency=0.0)
    # 4 microbatches a pipeline; half of 200 bytes to the other one, as a sum and, reduced, back: 2 s
    assert seconds(spec(2, 2, 8, "None"), profile(4, thin)) == pytest.approx(6 * 5 + 2)


def test_all_sums_but_the_last_are_sent_while_later_microbatches_are_computed() -> None:
    """Each of four pipelines runs 3 microbatches of 12 s. Two send the sum of their first after 12 s, and two the
    sum of their first two after 24 s; all exchange the sums of the rest, and then the reduced chunks, after 36 s.
    """
    for rate in (100.0, 5.0):
        each = 100 / rate  # three chunks of 100 bytes, on a link each
        thin = Network(flow=rate, machine=1e15, latency=0.0)
        assert seconds(spec(1, 4, 12, "None"), profile(4, thin)) == pytest.approx(max(36, 24 + each) + 2 * each)


def test_large_frames_take_all_connections_of_a_link_and_no_more_than_the_machine_has() -> None:
    """Large frames use all connections of a link, up to the machine's rate. Each worker sends 8 MiB twice."""
    mib = 1 << 20

    def reduction(machine: float, gradients: int = 8 * mib) -> float:
        network = Network(flow=2.0 * mib, machine=machine * mib, latency=0.0)
        return seconds(spec(2, 2, 8, "None"), profile(4, network, gradients=gradients)) - 6 * 5

    assert reduction(100.0) == pytest.approx(2)
    assert reduction(5.0) == pytest.approx(16 / 5), "what a machine's connections carry together"
    small = reduction(100.0, gradients=mib // 2)
    assert small == pytest.approx(0.5), "frames of half a MiB travel on one connection"


def test_a_slow_link_cannot_hide_the_replicas() -> None:
    """On a slow link, sending 200 bytes of gradients to replicas takes longer (200 s) than the step's work (54 s)."""
    thin = Network(flow=1.0, machine=1e15, latency=0.0)
    assert seconds(spec(2, 1, 8), profile(4, thin)) == pytest.approx(200)
    assert seconds(spec(2, 1, 8, "None"), profile(4, thin)) == pytest.approx(54)


def test_updates_come_before_the_first_forward() -> None:
    assert seconds(spec(2, 1, 8, "None"), profile(4, update=1.0)) == pytest.approx(6 * 9 + 2)


@pytest.mark.parametrize("mode", ["None", "Replicas"])
def test_devices_are_stages_of_their_own(mode: str) -> None:
    for stages, devices in ((1, 4), (2, 2), (4, 1)):
        assert seconds(spec(stages, 1, 8, mode, devices), profile(8)) == pytest.approx(6 * 11)
    assert seconds(spec(2, 1, 8, mode, 2), profile(8, update=1.0)) == pytest.approx(6 * 11 + 2), "one each"


def test_what_a_device_gives_to_another_of_its_worker_takes_no_time() -> None:
    thin = Network(flow=10.0, machine=1e15, latency=0.0)
    took = [seconds(spec(4 // n, 1, 8, "None", n), profile(4, thin, boundary=100)) for n in (4, 2, 1)]
    assert took[0] == pytest.approx(3 * 11)
    assert took[0] + 10 < took[1] < took[2], "a boundary takes 10 s"


def test_devices_of_a_worker_share_its_connections() -> None:
    """An exchange of 400 bytes of gradients takes 4 s with any number of devices, which share the connections."""
    thin = Network(flow=100.0, machine=1e15, latency=0.0)
    whole, halves = (seconds(spec(1, 2, 8, "None", n), profile(4, thin)) for n in (1, 2))
    assert whole == pytest.approx(4 * 12 + 4)
    assert halves == pytest.approx(5 * 6 + 4 - 2), "but the second one's half, which ends first, is hidden"
    slow = Network(flow=1.0, machine=1e15, latency=0.0)
    replicas = [seconds(spec(2, 1, 8, "Replicas", n), profile(4, slow)) for n in (1, 2)]
    assert replicas == pytest.approx([200, 200]), "a replica has to follow over the link"


def test_the_loss_of_a_worker_is_that_of_all_its_devices() -> None:
    job, model = spec(2, 1, 8, "Replicas", 2), profile(4)
    plan, times = plan_of(job, 4), StepModel(model.figures, job)
    calm = times.seconds(plan, plan.target)
    later = moved(plan, Cell(0, 1), "w0")
    took, repeating = times.disturbed(plan, [(11.0, later)], plan.target, {"w1": 10.0})
    assert calm == pytest.approx(3 * 11)
    assert calm + 8 * 3 * 0.5 < took < 2 * calm, "each device of the other one has two stages from now on"
    assert times.seconds(later, plan.target) == pytest.approx(2 * 8 * 3 + 7), (
        "what a device does, and the first one through"
    )
    assert 0 < repeating < took


grids = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(3, 10))


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(1, 2), st.floats(1, 1e4), st.floats(1, 8), st.sampled_from(["None", "Replicas"]))
def test_more_bandwidth_is_never_slower(
    grid: tuple[int, int, int], devices: int, flow: float, more: float, mode: str
) -> None:
    job = spec(*grid, mode, devices)
    slow = profile(2 * grid[0], Network(flow=flow, machine=2 * flow, latency=0.01), boundary=100)
    fast = profile(2 * grid[0], Network(flow=more * flow, machine=2 * more * flow, latency=0.01), boundary=100)
    assert seconds(job, fast) <= seconds(job, slow) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(grids, st.integers(1, 2), st.data())
def test_a_loss_never_makes_a_step_shorter(grid: tuple[int, int, int], devices: int, data: st.DataObject) -> None:
    stages, _, _ = grid
    job, model = (
        spec(*grid, devices=devices),
        profile(2 * grid[0], Network(flow=1e4, machine=2e4, latency=0.01), boundary=10),
    )
    if stages == 1:
        return
    plan, times = plan_of(job, 2 * stages), StepModel(model.figures, job)
    calm = times.seconds(plan, plan.target)
    victim = data.draw(st.sampled_from(sorted(plan.holders())))
    cell = plan.owned_by(victim)[0]
    heir = plan.at(cell).shadow
    assert heir is not None
    at = data.draw(st.floats(0, calm))
    later = moved(plan, cell, heir)
    took, repeating = times.disturbed(plan, [(at + 0.5, later)], plan.target, {victim: at})
    work = 6 * len(plan.target.split[cell.pipeline])
    assert at + 0.5 <= took
    assert took <= calm + 2 * work + 10
    assert repeating <= took


def moved(plan: Plan, cell: Cell, heir: str) -> Plan:
    rows = [list(row) for row in plan.pipelines]
    rows[cell.pipeline][cell.stage] = Assignment(owner=heir)
    return msgspec.structs.replace(plan, epoch=plan.epoch + 1, pipelines=tuple(map(tuple, rows)))
