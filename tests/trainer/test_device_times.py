"""Devices that run ahead of their host: what each takes, and when it is done."""

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_engine import manifest

from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.engine.steps.device_times import DeviceTimes
from bamboo_trainer.stage.stage import Stage
from queued_device import QueuedDevice, QueuedHost, QueuedJob, Speed
from training_job import Fault, check_same_bits

SPEED = Speed(forward=0.02, backward=0.04, copy=0.001)
OTHERS = {  # of device stages, so that their bubbles differ: for the second one the others wait
    0: Speed(forward=0.01, backward=0.016, copy=0.001),
    1: Speed(forward=0.03, backward=0.05, copy=0.001),
    2: Speed(forward=0.016, backward=0.024, copy=0.001),
}


@cache
def trained(faults: tuple[Fault, ...] = ()) -> QueuedJob:
    """Two workers, each with two devices, and six microbatches."""
    document: dict[str, Any] = manifest(2, 1, steps=7)
    document["spec"]["task"]["config"]["blocks"] = 6
    document["spec"]["training"]["globalBatchSize"] = 12
    return QueuedJob(document, SPEED, 2, OTHERS, faults).run()  # type: ignore[return-value]


def test_who_takes_over_waits_once_for_its_devices() -> None:
    calm, killed = trained(), trained((Fault("ReportReady", Cell(0, 3), 5),))
    check_same_bits(killed, calm)
    (takeover,) = killed.state.moves.takeovers
    assert takeover.forwards >= 4, "it is over when all parts have caught up"
    assert killed.hosts[0].waits < calm.hosts[0].waits + 18, "not for each of the 24 instructions of its two devices"
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
            mark=device.mark,
            values=values,
            mark_inputs=lambda: None,
            take_entry=lambda: None,
            device=device,
            runs_ahead=True,
        )
        stages.append(cast(Stage, one))
    return DeviceTimes(host.clock, StageTimer(host.clock), 2), stages, now


def give(times: DeviceTimes, stage: Stage, seconds: float, took: list[float]) -> None:
    with times.measuring(stage, lambda found: took.append(round(found, 6))):
        cast(Any, stage).device.run(stage.values.index, seconds)


def test_it_is_told_afterwards_what_each_piece_took_and_when_its_device_was_done() -> None:
    times, (first, second), now = clocked()
    took: list[float] = []
    give(times, first, 1.0, took)
    give(times, second, 0.25, took)
    times.collect()
    assert took == []
    now[0] = 0.5
    times.collect()
    assert took == [0.25], "the other device's work goes on"
    assert (times.freed(0), times.freed(1)) == (None, pytest.approx(0.25))
    now[0] = 1.5
    assert times.freed(0) == pytest.approx(1.0)
    give(times, first, 0.125, took)
    now[0] = 3.0
    times.collect()
    assert took[1:] == [1.0, 0.125]
    assert times.freed(0) == pytest.approx(1.625)


def test_what_is_measured_while_roles_change_is_forgotten() -> None:
    times, (stage, _), now = clocked()
    took: list[float] = []
    give(times, stage, 1.0, took)
    times.forget()
    now[0] = 2.0
    times.collect()
    assert took == []
