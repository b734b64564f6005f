"""Times of stages and devices: a worker's reports, also if its devices queue work, and jobs with a slow worker."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_engine import manifest

from bamboo_core.planning.plan import Cell
from bamboo_core.planning.schedule import Backward, BackwardRest, Forward, ReportReady
from bamboo_core.planning.splits.speeds import MOST_MICROBATCHES
from bamboo_trainer.engine.stage_times import FIRST_REPORT, IGNORED, DeviceTimes, StageTimer
from bamboo_trainer.stage.forwarding import Forwarding
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts
from bamboo_trainer.training import TrainingConfig
from manifest_kit import bamboojob, mlp_task, training
from queued_device import QueuedDevice, QueuedHost, QueuedJob, Speed
from training_job import Fault, Job, check_same_bits

LAYER, BACKWARD = 0.01, 2.0  # seconds of a layer's forward; its backward takes that many times as long


def measured(timer: StageTimer, forwards: Sequence[float], stage: int = 0) -> None:
    for seconds in forwards:
        if not timer.begins_forward(stage):
            timer.ran(stage, Forward(0), seconds)
        timer.ran(stage, Backward(0), 2 * seconds)
    timer.ran(0, ReportReady(), 0.0)


def test_a_stage_takes_what_most_of_its_newest_microbatches_take() -> None:
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 2), (2, 3)])
    measured(timer, [9.0] * IGNORED + [1.0] * 20 + [50.0] * 5)
    (said,) = timer.due(0.0) or ()
    assert (said.layers, said.forward, said.backward) == ((0, 2), 1.0, 2.0)
    measured(timer, [3.0] * 40)
    (said,) = timer.due(2.0) or ()
    assert (said.forward, said.microbatches) == (3.0, MOST_MICROBATCHES)


def test_the_first_times_are_told_before_a_long_step_is_done() -> None:
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 1)])
    for number in range(IGNORED + FIRST_REPORT):
        assert timer.due(0.0) is None, number
        timer.begins_forward(0)
        timer.ran(0, Forward(0), 1.0)
        timer.ran(0, Backward(0), 2.0)
    (said,) = timer.due(0.0) or ()
    assert (said.microbatches, said.forward, said.backward) == (FIRST_REPORT, 1.0, 2.0)


def test_times_are_told_once_a_second_and_only_when_a_step_is_done() -> None:
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 1)])
    assert timer.due(0.0) is None
    timer.ran(0, Forward(0), 1.0)
    assert timer.due(0.0) is None
    measured(timer, [1.0] * 5)
    assert timer.due(10.0)
    assert timer.due(10.5) is None
    assert timer.due(11.1)


def test_times_are_summed_up_once_for_each_time_that_they_are_told() -> None:
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 1)])
    for seconds in (1.0, 7.0):
        measured(timer, [seconds] * 2 * MOST_MICROBATCHES)
    assert [said.forward for said in timer.due(0.0) or ()] == [1.0]
    measured(timer, [9.0] * 2 * MOST_MICROBATCHES)
    assert [said.forward for said in timer.due(0.5) or ()] == []
    assert [said.forward for said in timer.due(1.0) or ()] == [9.0]
    measured(timer, [2.0] * 2 * MOST_MICROBATCHES)
    assert [times.forward for _, times in timer.owned()] == [2.0]
    measured(timer, [3.0] * 2 * MOST_MICROBATCHES)
    assert [times.forward for _, times in timer.owned()] == [3.0]


def test_what_was_measured_of_another_split_or_of_a_stage_that_is_gone_does_not_count() -> None:
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 1), (1, 2)])
    measured(timer, [1.0] * 5)
    measured(timer, [1.0] * 5, stage=1)
    timer.hold({1})
    timer.ran(0, ReportReady(), 0.0)
    assert [said.layers for said in timer.due(0.0) or ()] == [(1, 2)]
    timer.begin([(0, 2)])
    assert timer.due(5.0) is None


def test_layers_are_as_slow_as_whole_forwards_are_now() -> None:
    """Layers' times follow the newest whole forwards, since only one forward of sixteen measures its layers."""
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 2)])
    for seconds in [1.0] * 100 + [3.0] * 20:
        if timer.begins_forward(0):
            timer.ran_layer(0, 0, 0.4 * seconds)
            timer.ran_layer(0, 1, 0.8 * seconds)
        else:
            timer.ran(0, Forward(0), seconds)
        timer.ran(0, Backward(0), 2 * seconds)
    timer.ran(0, ReportReady(), 0.0)
    (said,) = timer.due(0.0) or ()
    assert (said.forward, said.each) == (3.0, (1.2, 2.4))


def test_a_backward_in_parts_takes_what_they_take_together() -> None:
    timer = StageTimer(time.monotonic)
    timer.begin([(0, 2)])
    for _ in range(IGNORED + 5):
        timer.begins_forward(0)
        for instruction, seconds in (
            (Forward(0), 1.0),
            (Backward(0), 0.5),
            (BackwardRest(0), 0.75),
            (BackwardRest(0), 0.75),
        ):
            timer.ran(0, instruction, seconds)
    timer.ran(0, ReportReady(), 0.0)
    (said,) = timer.due(0.0) or ()
    assert (said.forward, said.backward) == (1.0, 2.0)


class Timed(Stage):
    """A stage whose work takes time on the job's clock, which also advances with each turn of the job."""

    spend: Callable[[int, float], None]

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        for layer in self.values.layers:
            self.spend(layer, 1.0)
        return super().forward(work, step, microbatch, inputs)

    def advance(self, forwarding: Forwarding) -> None:
        self.spend(forwarding.layer, 1.0)
        super().advance(forwarding)

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Parts | None, *, postpone: bool = False
    ) -> Parts:
        for layer in self.values.layers:
            self.spend(layer, BACKWARD)
        return super().backward(work, step, microbatch, gradients, postpone=postpone)


class TimedJob(Job):
    """A job on a virtual clock, on which the work of layers takes time.

    slow: factors on the times of workers, by name. work: factors on the times of layers. A missing factor is 1.
    """

    def __init__(self, manifest: dict[str, Any], slow: dict[str, float], work: dict[int, float], **more: Any) -> None:
        self.slow, self.work = slow, work
        super().__init__(manifest, **more)

    def stage(self, worker: str, stage: int, stages: Sequence[tuple[int, int]], config: TrainingConfig) -> Stage:
        def spend(layer: int, share: float) -> None:
            self.now += LAYER * share * self.work.get(layer, 1.0) * self.slow.get(worker, 1.0)

        made = Timed(StageValues(self.task, stage, stages, config, self.computes_on[0]))
        made.spend = spend
        return made


def stage_times_manifest(steps: int) -> dict[str, Any]:
    return bamboojob(
        task=mlp_task(blocks=6),
        training=training(steps, 8, 2, gradientGroups=2),
        topology={"stages": 3, "schedule": "1F1B"},
        elastic={"minWorkers": 3, "maxWorkers": 3, "stabilizationSeconds": 0},
    )


@pytest.mark.parametrize("faults", [(), (Fault("Forward", Cell(0, 1), 2, 1),)])
def test_what_a_worker_says_is_what_it_computes_without_waits_and_repetitions(faults: tuple[Fault, ...]) -> None:
    """A worker reports times without waits, and without the work that it repeats as the heir of a lost worker."""
    job = TimedJob(stage_times_manifest(8), {"w2": 2.0}, {1: 3.0}, faults=faults)
    job.run()
    plan, found = job.state.plan, 0
    assert plan is not None
    for node in job.nodes.values():
        for said in node.engine.timer.due(1e9) or ():
            factor = job.slow.get(node.name, 1.0)
            each = [LAYER * factor * job.work.get(layer, 1.0) for layer in range(*said.layers)]
            if said.forward:
                found += 1
                assert (said.forward, said.backward) == pytest.approx((sum(each), BACKWARD * sum(each)), rel=1e-3)
                assert faults or said.microbatches >= 8
            if said.each:
                assert said.each == pytest.approx(each, rel=1e-3)
    assert found >= 3


SPEED = Speed(forward=0.02, backward=0.04, copy=0.001)
OTHERS = {  # of device stages, so that their bubbles differ: for the second one the others wait
    0: Speed(forward=0.01, backward=0.016, copy=0.001),
    1: Speed(forward=0.03, backward=0.05, copy=0.001),
    2: Speed(forward=0.016, backward=0.024, copy=0.001),
}


@cache
def trained(faults: tuple[Fault, ...] = ()) -> QueuedJob:
    """Train with six microbatches on two workers, each with two devices. Return the job."""
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
    """Return the `DeviceTimes` of a worker with two devices, the devices' stages, and the clock's seconds in a list."""
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
