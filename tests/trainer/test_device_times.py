"""Devices that run ahead of their host: when each is busy, and that work in advance is done in the bubbles of each."""

import math
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_engine import manifest

from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.steps.device_times import DeviceTimes
from bamboo_trainer.stage.stage import Stage
from queued_device import QueuedDevice, QueuedHost, QueuedJob, Ran, Speed
from training_job import Fault, check_same_bits

SPEED = Speed(forward=0.02, backward=0.04, copy=0.001)
OTHERS = {  # of device stages, so that their bubbles differ: for the second one the others wait
    0: Speed(forward=0.01, backward=0.016, copy=0.001),
    1: Speed(forward=0.03, backward=0.05, copy=0.001),
    2: Speed(forward=0.016, backward=0.024, copy=0.001),
}
TURN = 0.001  # seconds between two turns of a worker
FIRST = 4  # the first step in which bubbles are known, as roles change in the first one


@cache
def trained(mode: str, devices: int, faults: tuple[Fault, ...] = (), *, fast: bool = False) -> QueuedJob:
    """Two workers, each with so many devices, and six microbatches. fast: the second device stage takes less than
    others, so that there is time for backwards, too.
    """
    others = {1: OTHERS[0], 2: OTHERS[2]} if fast else OTHERS
    document: dict[str, Any] = manifest(2, 1, mode=mode, steps=7)
    document["spec"]["task"]["config"]["blocks"] = 4 * devices - 2
    document["spec"]["training"]["globalBatchSize"] = 12
    return QueuedJob(document, SPEED, devices, others, faults).run()  # type: ignore[return-value]


def own(job: QueuedJob, worker: int, device: int) -> list[Ran]:
    """What the schedule had the device compute."""
    stage = worker * len(job.hosts[worker].devices) + device
    return [ran for ran in job.hosts[worker].devices[device].ran if ran.stage == stage]


def ahead(job: QueuedJob, worker: int, device: int) -> list[Ran]:
    """What it computed in advance once bubbles were known."""
    first, since = own(job, worker, device)[0], job.at[Fault("Forward", Cell(0, 0), FIRST)]
    return [ran for ran in job.hosts[worker].devices[device].ran if ran.stage != first.stage and ran.begin > since]


def blocked(job: QueuedJob) -> int:
    """The pieces beside the schedule that a device began later than it was given them, but for copies of their inputs:
    some of those that check forwards again, and none in advance.
    """
    places = [(worker, device) for worker, host in enumerate(job.hosts) for device in range(len(host.devices))]
    return sum(ran.begin - ran.given > 2 * SPEED.copy + 1e-9 for place in places for ran in ahead(job, *place))


def both(one: Sequence[Ran], other: Sequence[Ran]) -> float:
    """The seconds in which both are computed."""
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a in one for b in other)


@pytest.mark.parametrize("devices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_forwards_in_advance_fill_the_bubbles_of_each_device_and_delay_none(devices: int) -> None:
    plain, eager = trained("LazyForward", devices), trained("EagerForward", devices)
    check_same_bits(eager, plain)
    filled = {}
    for worker in range(2):
        for device in range(devices):
            expected, found = own(plain, worker, device), own(eager, worker, device)
            assert len(found) == len(expected)
            late = max(abs(a.end - b.end) for a, b in zip(found, expected, strict=True))
            assert late <= 2 * TURN, f"device {device} of worker {worker} is {late:.3f} s late"
            filled[worker, device] = sum(ran.end - ran.begin for ran in ahead(eager, worker, device))
        assert eager.hosts[worker].waits == plain.hosts[worker].waits
    if devices == 2:  # with more other forwards are checked again
        assert blocked(eager) <= blocked(plain), "a device waits for what another one has yet to make"
    assert all(filled.values()), filled
    if devices > 1:
        assert max(filled.values()) > 1.5 * min(filled.values()), "each has as much as its own bubble has room for"
        pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
        for worker in range(2):
            beside = sum(both(ahead(eager, worker, a), own(eager, worker, b)) for a, b in pairs)
            assert beside > 0.1, "a device works in advance only while none of its worker's devices computes"


@pytest.mark.parametrize("devices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_done_whenever_a_device_is_idle_delays_its_own_work_by_one_piece_at_most(devices: int) -> None:
    plain, eager = (trained(mode, devices, fast=True) for mode in ("LazyForward", "EagerBackward"))
    check_same_bits(eager, plain)
    did = {(f.name, f.cell.stage) for f in eager.executed if f.step >= FIRST}
    assert did >= {("RedundantForward", stage) for stage in range(2 * devices)}
    assert "RedundantBackward" in {name for name, _ in did}
    assert eager.step_seconds(5) <= plain.step_seconds(5) + SPEED.backward


@pytest.mark.parametrize("mode", ["EagerForward", "EagerBackward"])
def test_who_takes_over_goes_on_from_what_its_devices_were_given_and_waits_for_it_once(mode: str) -> None:
    calm, killed = trained(mode, 2), trained(mode, 2, (Fault("ReportReady", Cell(0, 3), 5),))
    check_same_bits(killed, calm)
    (takeover,) = killed.state.moves.takeovers
    assert takeover.reused > 0
    assert takeover.forwards >= 4, "it is over when all parts have caught up"
    assert killed.hosts[0].waits < calm.hosts[0].waits + 12, "not for each of the 24 instructions of its two devices"
    assert takeover.recompute_ms >= 1000 * 2 * OTHERS[2].backward


def clocked() -> tuple[DeviceTimes, list[Stage], list[float]]:
    """A worker's two devices, each with a stage, and the seconds that its clock shows."""
    now = [0.0]
    host = QueuedHost(lambda: now[0])
    host.devices += [QueuedDevice(host, number, SPEED) for number in range(2)]
    stages = []
    for number, device in enumerate(host.devices):
        values = SimpleNamespace(index=number)
        one = SimpleNamespace(
            mark=device.mark, values=values, mark_inputs=lambda: None, take_entry=lambda: None, device=device
        )
        stages.append(cast(Stage, one))
    return DeviceTimes(host.clock, 2), stages, now


def give(times: DeviceTimes, stage: Stage, seconds: float, took: list[tuple[float, float]], **how: bool) -> None:
    begun = times.begin(stage)
    cast(Any, stage).device.run(stage.values.index, seconds)
    times.end(begun, lambda *found: took.append((round(found[0], 6), round(found[1], 6))), **how)


def test_it_is_told_afterwards_what_each_piece_took_and_how_long_its_device_waited() -> None:
    times, (first, second), now = clocked()
    took: list[tuple[float, float]] = []
    give(times, first, 1.0, took)
    give(times, second, 0.25, took)
    assert (times.busy(0), times.busy(1)) == (True, True)
    times.collect()
    assert took == []
    now[0] = 0.5
    times.collect()
    assert took == [(0.25, 0.0)], "the other device's work goes on"
    now[0] = 1.5
    give(times, first, 0.125, took)
    now[0] = 3.0
    times.collect()
    assert took[1:] == [(1.0, 0.0), (0.125, 0.5)]


def test_a_device_is_idle_since_it_has_done_what_the_schedule_demands_whenever_that_is_asked() -> None:
    times, (stage, _), now = clocked()
    assert times.idle(0) == math.inf
    give(times, stage, 1.0, [])
    now[0] = 0.75
    assert times.idle(0) == 0.0
    now[0] = 1.25
    assert times.idle(0) == pytest.approx(0.25)
    give(times, stage, 0.5, [], scheduled=False)
    assert times.busy(0)
    now[0] = 1.5
    assert times.idle(0) == pytest.approx(0.5), "work in advance is none of the schedule's"
    now[0] = 2.0
    assert not times.busy(0)
    assert times.freed(0) == pytest.approx(1.0)


def test_what_is_measured_while_roles_change_is_forgotten() -> None:
    times, (stage, _), now = clocked()
    took: list[tuple[float, float]] = []
    give(times, stage, 1.0, took)
    times.forget()
    now[0] = 2.0
    times.collect()
    assert took == []
