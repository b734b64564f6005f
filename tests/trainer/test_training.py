"""The length of a training in tokens or epochs, and workers with different data."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import SpecChanged
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.task import Task, TrainingFacts
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.training import shown_to_build, with_steps
from manifest_kit import bamboojob, training
from stage_kit import small_task
from training_job import Job
from world import World

SAMPLES = 12  # of `small_task`
SEEN: list[TrainingFacts] = []


def build(config: Mapping[str, Any], training: TrainingFacts) -> Task:
    SEEN.append(training)
    task = small_task(tokens_per_sample=5)
    steps = training.steps_with(task.dataset, task.tokens_per_sample)
    return replace(task, learning_rate=lambda step: 0.1 * (1 - step / steps))


def document(stages: int = 2, **length: Any) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "test_training:build"},
        training={**training(1, 8, 2), "steps": None, **length},
        topology={"stages": stages},
        redundancy={"mode": "Replicas"},
    )


@pytest.mark.parametrize(("length", "steps"), [({"tokens": 81}, 3), ({"epochs": 2}, 3)])
def test_a_job_trains_for_as_many_steps_as_follow_from_its_data(length: dict[str, int], steps: int) -> None:
    job = Job(document(**length)).run()
    same = Job(document(1, steps=steps)).run()
    assert job.end.message == f"all {steps} steps are done"
    assert len(job.state.progress.losses) == steps
    assert job.state.progress.losses == same.state.progress.losses, (
        "a build that asks for the number of steps gets the same one"
    )


def test_a_build_is_told_the_length_as_it_was_given() -> None:
    facts = shown_to_build(parse_manifest(document(epochs=2)).training)
    assert (facts.steps, facts.epochs, facts.tokens) == (None, 2, None)
    assert facts.steps_with(small_task().dataset) == 3
    tokens = shown_to_build(parse_manifest(document(tokens=80)).training)
    with pytest.raises(ValueError, match="tokens_per_sample must be given"):
        tokens.steps_with(small_task().dataset)


def test_tokens_need_a_task_that_counts_them() -> None:
    spec = parse_manifest(document(tokens=80))
    with pytest.raises(TaskError, match="the task does not say its tokens_per_sample"):
        with_steps(spec, small_task())
    with pytest.raises(TaskError, match="tokens_per_sample must be an integer of at least 1, got 0"):
        with_steps(spec, small_task(tokens_per_sample=0))


def test_before_any_worker_has_the_data_nobody_knows_how_many_steps_there_are() -> None:
    job = Job(document(epochs=2))
    assert job.state.spec.training.known_steps is None
    job.run()
    assert job.state.spec.training.known_steps == 3
    job.finish, job.state = None, replace(job.state, course=replace(job.state.course, phase="Running"))
    job.state, _ = coordinator.step(job.state, SpecChanged(job.documented), job.now)
    assert job.state.spec.training.known_steps == 3, "an edit does not forget it"


def test_a_worker_with_other_data_is_not_taken() -> None:
    world = World(2, 1, 1)
    world.settle()
    world.tell(Received("w0", protocol.WorkerReady(samples=100, steps=50)))
    spare = next(w for w in world.state.workers if not world.plan.owned_by(w))
    world.tell(Received(spare, protocol.WorkerReady(samples=90, steps=50)))
    assert spare not in world.state.workers
    assert world.state.admission.misfit == (
        spare,
        f"{spare} has data with 90 samples, and those of w0 have 100 samples",
    )
