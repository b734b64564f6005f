"""Workers with several devices, in one process with the real coordinator and stages: the bits are those of one device,
undisturbed and when a worker is lost at any instruction.
"""

from functools import cache
from typing import Any

import pytest
from test_engine import STEPS, manifest

from bamboo_core.control import protocol
from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell, Plan
from bamboo_core.planning.splits.devices import devices_of, expanded
from branching_job import BranchingJob, each_way
from flipped_job import Flip, FlippedJob, Place
from training_job import Fault, Job, check_same_bits, one_of_each_kind


def divided(stages: int, pipelines: int = 1, **more: Any) -> dict[str, Any]:
    """Six layers."""
    document = manifest(stages, pipelines, **more)
    document["spec"]["task"]["config"]["blocks"] = 4
    return document


@cache
def with_one_device(stages: int, pipelines: int, steps: int = STEPS, tied: bool = False) -> Job:
    return Job(divided(stages, pipelines, steps=steps, tied=tied)).run()


@pytest.mark.parametrize(
    ("stages", "pipelines", "devices", "tied"),
    [(1, 1, 2, True), (2, 1, 3, True), (3, 1, 2, False), (2, 2, 2, True), (1, 2, 3, False)],
)
def test_the_number_of_devices_does_not_change_the_bits(stages: int, pipelines: int, devices: int, tied: bool) -> None:
    job, calm = Job(divided(stages, pipelines, tied=tied), per_worker=devices).run(), with_one_device(1, 1, tied=tied)
    check_same_bits(job, calm)
    weights = calm.weights
    assert all(tensor.equal(weights[name]) for name, tensor in job.weights.items())
    plan = job.state.current_plan
    assert (len(plan.stages), devices_of(plan)) == (stages, devices)
    assert {f.cell.stage for f in job.executed if f.name == "Forward"} == set(range(stages * devices))
    owners = {
        cell: worker for worker, did in job.executed_by.items() for cell in {f.cell for f in did if f.name == "Forward"}
    }
    assert owners == {cell: expanded(plan).at(cell).owner for cell in expanded(plan).cells()}


def test_a_worker_says_at_a_reconnection_the_plan_that_it_was_told() -> None:
    job = Job(divided(2, steps=2), per_worker=2)
    told: dict[int, Plan] = {}

    def decide(job: Job) -> None:
        if job.state.plan:
            told[job.state.plan.epoch] = job.state.plan
        for node in job.nodes.values():
            if node.engine.plan_told:
                assert node.engine.plan_told == told[node.engine.plan_told.epoch]

    job.decide = decide
    job.run()
    assert told


def test_checkpoints_are_the_same_files() -> None:
    document = divided(2, steps=4)
    document["spec"]["checkpoint"] = {"storage": "memory://here", "everySteps": 2}
    one, two = Job(document).run(), Job(document, per_worker=2).run()
    check_same_bits(two, one)
    assert [c.step for c in two.store.committed] == [c.step for c in one.store.committed]
    last = max(one.store.committed), max(two.store.committed)
    files = [
        {layer: data for (c, layer), data in job.store.files.items() if c == at}
        for job, at in zip((one, two), last, strict=True)
    ]
    assert files[0] == files[1]


def test_too_few_layers_are_refused_before_training() -> None:
    job = Job(divided(4), per_worker=2).run()
    assert (job.end.outcome, job.end.reason) == (Outcome.FAILED, "InvalidTopology")
    assert "spec.worker.devices (2)" in job.end.message
    assert not any(isinstance(e, protocol.SendPlan) for node in job.nodes.values() for e in node.events)


def test_a_kill_at_an_instruction_of_either_part_of_a_stage_leaves_the_bits() -> None:
    document = divided(2, steps=6)
    document["spec"]["topology"]["split"] = [3, 3]
    calm, undisturbed = with_one_device(2, 1, 6), Job(document, per_worker=2).run()
    check_same_bits(undisturbed, calm)
    assert {fault.cell.stage for fault in undisturbed.executed if fault.name == "Rehearsal"} == {0, 1, 2, 3}
    executed = [fault for fault in undisturbed.executed if fault.step == 4]
    chosen = one_of_each_kind(executed, lambda fault: (fault.name, fault.cell.stage % 2))

    class Killed(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            return fault in chosen and self.branch(fault)

    assert each_way(lambda: Killed(document, per_worker=2), lambda job: check_same_bits(job, calm)).keys() == chosen


def test_states_of_every_part_are_compared_and_a_flipped_bit_is_found() -> None:
    document = divided(2, steps=6)
    calm = Job(document, per_worker=2).run()
    check_same_bits(calm, with_one_device(2, 1, 6))
    for part in (2, 3):
        owner = calm.state.current_plan.at(Cell(0, 1)).owner
        flip = Flip(place=Place.PARAMETERS, stage=part, worker=owner, step=3, microbatch=1)
        job = FlippedJob(document, flip, per_worker=2)
        job.run()
        assert job.flipped
        assert job.end.reason == "ResultsDiffer"
        assert "of stage 1 after 4 steps" in job.end.message
