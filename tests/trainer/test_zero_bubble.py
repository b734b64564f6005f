"""Postponed weight gradients, in ZB-H1 or after a takeover in 1F1B, which change no bit, also after kills."""

from typing import Any

import pytest

from bamboo_core.coordinator.events import SpecChanged
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Cell
from manifest_kit import bamboojob, gpt_task, training
from training_job import Fault, Job, check_same_bits


def manifest(stages: int, pipelines: int, *, schedule: str = "ZBH1", **changes: Any) -> dict[str, Any]:
    return bamboojob(
        task=gpt_task(dModel=16, context=8, **changes.pop("task", {})),
        training=training(changes.pop("steps", 4), 12, 2, maxGradientNorm=1.0, **changes.pop("training", {})),
        topology={"stages": stages, "pipelines": pipelines, "schedule": schedule},
        redundancy={"mode": "Replicas"} | changes,
    )


def test_the_heir_computes_weight_gradients_last() -> None:
    """An heir repeats input gradients first, as neighbours wait for these; at least three weight gradients follow."""
    job = Job(manifest(4, 1), (Fault("BackwardInput", Cell(0, 2), 2, 5),)).run()
    heir = job.executed_by["w1"]
    ran = [fault for fault in heir if fault.step == 2 and not fault.after]
    last = max(place for place, fault in enumerate(ran) if fault.name == "BackwardInput")
    after = [fault.name for fault in ran[last:]]
    assert after.count("BackwardWeight") >= 3


def test_in_a_1f1b_job_too_what_is_taken_over_postpones_weight_gradients() -> None:
    """Weight gradients are postponed in the cell and step of the takeover alone. The bits are those of an undisturbed
    run, even if the heir is lost in the same step.
    """
    document, lost = manifest(3, 1, schedule="1F1B"), Fault("Backward", Cell(0, 1), 2, 3)
    expected = Job(document).run()
    once = Job(document, (lost,)).run()
    parts = ("BackwardInput", "BackwardWeight")
    assert {(fault.cell, fault.step) for fault in once.executed if fault.name in parts} == {(Cell(0, 1), 2)}
    assert once.digests == expected.digests
    document["spec"]["redundancy"]["replicas"] = 2
    for part in parts:
        twice = Job(document, (lost, Fault(part, Cell(0, 1), 2, 4))).run()
        assert not twice.faults, "the worker that had taken over was lost, too"
        assert twice.digests == expected.digests


@pytest.mark.parametrize("pipelines", [1, 2])
def test_the_schedule_may_change_at_any_step_and_changes_no_bit(pipelines: int) -> None:
    """Edits of the schedule every few steps, and the loss of a worker after the last edit, change no bit."""
    left = [(2, "ZBH1"), (5, "1F1B"), (8, "ZBH1")]

    def decide(job: Job) -> None:
        if left and job.state.plan and job.state.step >= left[0][0]:
            document = manifest(3, pipelines, schedule=left.pop(0)[1], steps=12)
            job.inbox.append(SpecChanged(parse_manifest(document)))

    lost = Fault("BackwardInput", Cell(0, 1), 10, 1)
    job = Job(manifest(3, pipelines, schedule="1F1B", steps=12), (lost,), decide=decide).run()
    expected = Job(manifest(3, 1, schedule="1F1B", steps=12)).run()
    check_same_bits(expected, job)
    assert sum(e.reason == "ScheduleChanged" for e in job.emitted) == 3
    ran = {step: {f.name for f in job.executed if f.step == step and f.cell == Cell(0, 2)} for step in range(12)}
    postponed = [step for step, names in ran.items() if "BackwardWeight" in names]
    assert 0 < len(postponed) < 12
    assert {"Backward"} == {name for step in (0, 1) for name in ran[step] if name.startswith("Backward")}
