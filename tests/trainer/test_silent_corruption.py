"""Silent corruption: detection of a flipped bit, after which the job restores a checkpoint, at most once, or ends."""

from functools import cache
from typing import Any

import pytest

from bamboo_core.coordinator.events import Outcome, RestoreCause
from flipped_job import Flip, FlippedJob, Place
from manifest_kit import bamboojob, mlp_task, training
from training_job import Job

STEPS, FLIPPED = 8, 5
OWNER, SHADOW = "w1", "w0"  # of stage 1


def manifest(mode: str = "Replicas", standby: int = 1) -> dict[str, Any]:
    return bamboojob(
        task=mlp_task(),
        training=training(STEPS, 8, 2),
        topology={"stages": 3},
        redundancy={"mode": mode},
        standby={"workers": standby},
        checkpoint={"storage": "memory://x", "everySteps": 2},
    )


@cache
def undisturbed() -> str:
    return Job(manifest(standby=0)).run().bits


def check_found_and_undone(job: FlippedJob) -> None:
    """Check that a job restored a checkpoint once after a flipped bit, and has the bits of an undisturbed job."""
    assert job.flipped
    assert [emit.reason for emit in job.emitted].count("ResultsDiffer") == 1
    assert job.state.checkpoints.counts.restores == {RestoreCause.RESULTS_DIFFER: 1}
    assert job.bits == undisturbed()


@pytest.mark.parametrize("worker", [OWNER, SHADOW])
@pytest.mark.parametrize("place", [Place.PARAMETERS, Place.OPTIMIZER, Place.FINAL])
def test_a_flipped_bit_of_either_copy_is_found_before_the_next_checkpoint_and_undone(place: Place, worker: str) -> None:
    flip = Flip(place=place, stage=1, worker=worker, step=FLIPPED, microbatch=1)
    job = FlippedJob(manifest(), flip)
    job.run()
    check_found_and_undone(job)


@pytest.mark.parametrize("worker", [OWNER, SHADOW])
def test_without_checkpoints_it_is_found_within_32_steps_and_ends_the_job(worker: str) -> None:
    document = manifest()
    document["spec"]["training"]["steps"] = 40
    del document["spec"]["checkpoint"]
    job = FlippedJob(document, Flip(place=Place.PARAMETERS, stage=1, worker=worker, step=17, microbatch=1))
    job.run()
    assert (job.end.outcome, job.end.reason) == (Outcome.FAILED, "ResultsDiffer")
    assert "of stage 1" in job.end.message
    assert 17 <= job.state.step <= 32


@pytest.mark.parametrize("worker", ["w2", "w1"])
def test_a_bit_that_flips_while_a_checkpoint_is_copied_is_not_in_it(worker: str) -> None:
    """A bit that flips after equal checksums of a state are reported, but before its copy, is in no checkpoint."""
    flip = Flip(place=Place.PARAMETERS, stage=2, worker=worker, step=6, bit=9)
    job = FlippedJob(manifest(), flip)
    job.run()
    check_found_and_undone(job)


@pytest.mark.parametrize("place", [Place.FORWARD, Place.BACKWARD, Place.SUM])
def test_a_worker_that_is_wrong_every_time_is_found_by_a_spot_check(place: Place) -> None:
    """A spot check finds a worker that is wrong in each run of one step; the second difference ends the job."""
    flip = Flip(place=place, stage=1, worker=OWNER, step=FLIPPED, microbatch=0, every_time=True)
    job = FlippedJob(manifest("Replicas"), flip)
    job.run()
    assert job.end.reason == "ResultsDiffer"
    assert f"in step {FLIPPED + 1}, microbatch 0 of stage 1" in job.end.message
    assert job.state.guard.differences == 2
