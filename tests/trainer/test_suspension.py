"""Suspension of jobs: no step is committed after the checkpoint's step, so a resumed job repeats no step."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from bamboo_core.control.protocol import CheckpointFailed, PartsWritten, Received
from bamboo_core.coordinator.events import Interrupted, Outcome
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import ROOT
from manifest_kit import bamboojob, mlp_task, training
from training_job import Job

STEPS = 8
SLOW = 400  # turns in which others could train many steps


def manifest(stages: int, pipelines: int, standby: int = 0) -> dict[str, Any]:
    return bamboojob(
        "kept",
        task=mlp_task(blocks=4),
        training=training(STEPS, 8, 2, gradientGroups=2),
        topology={"stages": stages, "pipelines": pipelines},
        standby={"workers": standby},
        checkpoint={"storage": "memory://x", "everySteps": 1000},
    )


@cache
def undisturbed() -> str:
    return Job(manifest(3, 1)).run().bits


@dataclass
class Suspension:
    """A hook that suspends a job once `step` steps are committed, and delays reports of written parts by SLOW turns.

    meanwhile: called once in the middle of the delay. from_step: the number of committed steps at the suspension.
    """

    step: int
    meanwhile: Callable[[Job], None] = lambda job: None
    from_step: int | None = None
    late: list[Any] = field(default_factory=list)
    turns: int = 0

    def __call__(self, job: Job) -> None:
        if self.from_step is None and job.state.step >= self.step:
            self.from_step = job.state.step
            job.inbox.append(Interrupted("Suspended", "the job is suspended"))
        told = [event for event in job.inbox if isinstance(event, Received) and isinstance(event.message, PartsWritten)]
        if self.turns <= SLOW:
            self.late += told
            for event in told:
                job.inbox.remove(event)
        if self.late:
            self.turns += 1
        if self.turns == SLOW // 2:
            self.meanwhile(job)
        if self.turns > SLOW:
            job.inbox.extend(self.late)
            self.late.clear()


def suspended(document: dict[str, Any], suspension: Suspension) -> Job:
    job = Job(document, decide=suspension).run()
    assert (job.end.outcome, job.end.reason) == (Outcome.INTERRUPTED, "Suspended")
    return job


def resumed(job: Job, stages: int, pipelines: int) -> Job:
    return Job(manifest(stages, pipelines), store=job.store).run()


@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("step", [1, 4, STEPS - 2])
def test_it_goes_on_at_exactly_the_step_at_which_it_was_suspended(grid: tuple[int, int], step: int) -> None:
    suspension = Suspension(step)
    job = suspended(manifest(*grid), suspension)
    assert suspension.from_step is not None
    assert suspension.turns > SLOW, "others had the time to train on"
    (kept,) = job.store.committed
    assert suspension.from_step < kept.step <= suspension.from_step + 2
    assert job.state.step == kept.step, "no step was committed after it"
    after = resumed(job, 2, 1)
    assert after.bits == undisturbed()
    assert {fault.step for fault in after.executed if fault.name == "Forward"} == set(range(kept.step, STEPS))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_worker_that_is_lost_while_the_checkpoint_is_written_costs_no_bits(stage: int) -> None:
    """The loss of a worker while the checkpoint is written changes no bit, and a checkpoint is kept all the same."""

    def kill(job: Job) -> None:
        plan = job.state.current_plan
        job.kill(next(plan.at(cell).owner for cell in plan.cells() if cell.stage == stage))

    job = suspended(manifest(3, 1, standby=1), Suspension(4, kill))
    assert job.store.committed
    assert resumed(job, 2, 1).bits == undisturbed()


def test_if_the_store_fails_the_job_is_suspended_all_the_same() -> None:
    def fail(job: Job) -> None:
        checkpoint = job.state.checkpoints.writing
        assert checkpoint is not None
        worker = job.state.current_plan.at(ROOT).owner
        job.inbox.append(Received(worker, CheckpointFailed(checkpoint=checkpoint, message="full")))

    job = suspended(manifest(2, 1), Suspension(4, fail))
    assert job.store.committed == []
    assert resumed(job, 2, 1).bits == undisturbed()


def test_a_coordinator_that_does_not_know_of_the_suspension_has_the_job_go_on() -> None:
    """A coordinator that restarts without a record of the suspension asks for reports, and training goes on."""

    def forget(job: Job) -> None:
        job.state = coordinator_without_it(job)
        for node in job.nodes.values():
            node.engine.report()

    assert Job(manifest(3, 1), decide=Suspension(4, forget)).run().bits == undisturbed()


def coordinator_without_it(job: Job) -> CoordinatorState:
    empty = replace(job.state.checkpoints, writers=(), writing=None, parts={}, retry=False)
    return replace(job.state, checkpoints=empty, ending=replace(job.state.ending, stopping=None))
