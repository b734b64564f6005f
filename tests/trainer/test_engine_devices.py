"""Workers with several devices: their messages about stages, and the same bits as with one device.

The jobs run in one process with the real coordinator and stages: undisturbed, after a kill, or with a flipped bit.
"""

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import STEPS, manifest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Message, Report, StateSums, TakenOver
from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell, Plan
from bamboo_core.planning.shares import share
from bamboo_core.planning.splits.device_stages import devices_of, expanded
from bamboo_core.planning.splits.speeds import StageTimes
from bamboo_trainer.engine.devices import Folding
from branching_job import BranchingJob, each_way
from flipped_job import Flip, FlippedJob, Place
from training_job import Fault, Job, check_same_bits, one_of_each_kind

STAGES = ((0, 2), (2, 3), (3, 7), (7, 8))  # of two workers with two devices each


def taken(stage: int, epoch: int = 5, step: int = 7, milliseconds: float = 1.0, forwards: int = 4) -> TakenOver:
    return TakenOver(
        epoch=epoch,
        cell=Cell(1, stage),
        step=step,
        reform_ms=1.0,
        recompute_ms=milliseconds,
        forwards=forwards,
        backwards=2,
    )


def state_sums(stage: int, version: int, **found: int) -> StateSums:
    return StateSums(stage=stage, version=version, sums={name: f"{number:016x}" for name, number in found.items()})


def folded(folding: Folding, *messages: Message) -> list[Message | None]:
    return [folding.fold(message) for message in messages]


def test_a_stage_is_held_at_the_oldest_version_of_its_parts_and_not_without_one_of_them() -> None:
    said = Folding(2).fold(Report(committed=8, held={0: 9, 1: 8, 3: 9, 4: 2, 5: 3}))
    assert said == Report(committed=8, held={0: 8, 2: 2})


def test_a_cell_is_taken_over_when_its_last_part_is() -> None:
    late = taken(2, epoch=6, step=8, milliseconds=9.0, forwards=3)
    first, second = folded(Folding(2), taken(3), late)
    assert first is None
    assert second == msgspec.structs.replace(late, cell=Cell(1, 1), forwards=4)


def test_what_one_part_said_counts_no_more_once_the_cell_is_given_away() -> None:
    folding = Folding(2)
    assert folding.fold(taken(3)) is None
    folding.keep([Cell(1, 0), Cell(1, 1)], [0, 1])
    assert folded(folding, taken(2), taken(3))[0] is None


def test_sums_of_a_state_are_told_of_a_version_that_all_parts_have_come_to() -> None:
    folding = Folding(2)
    assert folded(folding, state_sums(2, 4, a=1), state_sums(2, 8, a=2), state_sums(0, 8, a=7)) == [None, None, None]
    assert folding.fold(state_sums(3, 8, b=5)) == state_sums(1, 8, a=2, b=5)
    assert folding.fold(state_sums(2, 8, a=2)) == state_sums(1, 8, a=2, b=5), "a report"
    folding.keep([], [0, 1])
    assert folding.fold(state_sums(3, 8, b=5)) is None


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True).map(tuple), min_size=2, max_size=2))
def test_everybody_writes_the_layers_that_the_coordinator_has_dealt(writers: list[tuple[str, ...]]) -> None:
    """Workers with several devices write the layers that the coordinator dealt, so it knows a lost writer's layers."""
    unfolded = Folding(2).unfolded_writers(tuple(writers), STAGES)
    for worker in "abcd":
        dealt = [share(mine, worker, layers) for mine, layers in zip(writers, ((0, 3), (3, 8)), strict=True)]
        mine = [share(part, worker, layers) for part, layers in zip(unfolded, STAGES, strict=True)]
        assert [layer for part in mine for layer in part] == [layer for part in dealt for layer in part]


def test_times_are_those_of_a_stage_once_each_part_has_been_measured() -> None:
    folding = Folding(2)
    parts = [
        StageTimes(layers=(0, 2), forward=1.0, backward=2.0, each=(0.5, 0.25), microbatches=9),
        StageTimes(layers=(2, 3), forward=4.0, backward=8.0, each=(4.0,), microbatches=7),
    ]
    whole = StageTimes(layers=(0, 3), forward=5.0, backward=10.0, each=(0.5, 0.25, 4.0), microbatches=7)
    assert folding.times(parts, STAGES) == (whole,)
    assert folding.times(parts[:1], STAGES) == ()
    in_advance = [StageTimes(layers=(3, 7), each=(1.0,) * 4), StageTimes(layers=(7, 8))]
    assert folding.times(in_advance, STAGES) == (StageTimes(layers=(3, 8)),)


def divided(stages: int, pipelines: int = 1, **more: Any) -> dict[str, Any]:
    """Return the manifest of a model of six layers."""
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
            if node.engine.reported_plan:
                assert node.engine.reported_plan == told[node.engine.reported_plan.epoch]

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
