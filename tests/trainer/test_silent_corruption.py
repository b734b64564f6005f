"""A bit flips somewhere, and nobody says so: it is found, put down to the worker that was wrong, and undone."""

import asyncio
import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.checkpoint_counts import RestoreCause
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.job_status import status
from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.steps.bubble_budget import BubbleBudget
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.worker.launch import process
from flipped_job import Flip, FlippedJob, Place
from folders import TASK_PATH
from processes import Processes
from training_job import Job

ENVIRONMENT = "BAMBOO_TEST_FLIP"  # {"mark": file, "place": [name, pipeline, stage, step, microbatch]}


def flip(tensor: Tensor) -> None:
    """The lowest bit of the exponent of its first number, which is then twice or half of what it was."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[0] ^= 1 << 23


class Flipping:
    """Strikes in what the stage computes next: in what a forward returns, or in the parameters after a step."""

    def __init__(self) -> None:
        document = json.loads(os.environ[ENVIRONMENT])
        self.mark, self.place = Path(document["mark"]), tuple(document["place"])
        self.armed = False

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.armed = (name, cell.pipeline, cell.stage, step, microbatch) == self.place

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.armed = False

    def event(self, name: str, **facts: object) -> None:
        pass

    def close(self) -> None:
        pass

    def strikes(self) -> bool:
        """Now, for the first time?"""
        if not self.armed:
            return False
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def flipping_worker(worker_id: str = "", **arguments: str) -> int:
    """A worker in which a bit flips at a chosen place, once per job, without any error."""
    name, flipping = arguments.pop("worker", worker_id), Flipping()
    complete, apply = Stage.complete, StageValues.apply

    def wrong_complete(stage: Stage, *given: Any) -> Any:
        outputs = complete(stage, *given)
        if outputs and flipping.strikes():
            flip(outputs[0])
        return outputs

    def wrong_apply(values: StageValues, *given: Any, **named: Any) -> None:
        apply(values, *given, **named)
        if flipping.strikes():
            flip(next(tensor.detach() for _, tensor in values.parameters.named()))

    Stage.complete, StageValues.apply = wrong_complete, wrong_apply  # type: ignore[method-assign]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return process.main(worker=name, observer=flipping, **arguments)


STEPS, FLIPPED = 8, 5
OWNER, SHADOW = "w1", "w0"  # of stage 1


def manifest(verify: str, mode: str = "EagerBackward", standby: int = 1, **redundancy: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "task": {"entrypoint": "bamboo_trainer.models.mlp:build", "config": {"width": 16, "blocks": 2, "samples": 32}},
        "training": {"steps": STEPS, "globalBatchSize": 8, "microBatchSize": 2},
        "topology": {"stages": 3},
        "redundancy": {"mode": mode, "verify": verify, **redundancy},
        "standby": {"workers": standby},
        "checkpoint": {"storage": {"uri": "memory://x"}, "everySteps": 2},
    }
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": "bits"}, "spec": spec}


@cache
def undisturbed() -> str:
    job = Job(manifest("None", standby=0)).run()
    assert job.outcome is Outcome.COMPLETE
    return add_digests(job.digests)


def flipped(
    document: dict[str, Any], worker: str, what: Place, stage: int = 1, *, every_time: bool = False
) -> FlippedJob:
    """A job in which a bit flips on that worker, in what belongs to that stage, at version FLIPPED of its state."""
    flip = Flip(place=what, stage=stage, worker=worker, step=FLIPPED, microbatch=1, every_time=every_time)
    job = FlippedJob(document, flip)
    job.run()
    return job


def told(job: FlippedJob) -> list[str]:
    return [emit.reason for emit in job.emitted]


def check_undone(job: FlippedJob, wrong: str) -> None:
    """It was found, put down to that worker and nobody else, and the weights are those of a job without it."""
    assert job.flipped
    assert job.outcome is Outcome.COMPLETE, (job.finish, job.emitted)
    assert job.state.verification.corrupt == (wrong,), [emit.message for emit in job.emitted if emit.warning]
    assert wrong in job.state.membership.gone
    assert add_digests(job.digests) == undisturbed()
    shown = status(job.state, job.now).differences
    assert shown is not None
    assert (shown.corrupt, shown.unresolved) == ((wrong,), "")
    assert not job.state.verification.disputes


def check_found_and_undone(job: FlippedJob) -> None:
    """The job went back once, and the weights are those of a job in which nothing happened."""
    assert job.flipped
    assert job.outcome is Outcome.COMPLETE, (job.finish, job.emitted)
    assert told(job).count("ResultsDiffer") == 1
    assert job.state.checkpoints.counts.restores == {RestoreCause.RESULTS_DIFFER: 1}
    assert add_digests(job.digests) == undisturbed()


@pytest.mark.parametrize("worker", [OWNER, SHADOW])
@pytest.mark.parametrize("place", [Place.PARAMETERS, Place.OPTIMIZER, Place.FINAL])
def test_a_flipped_bit_of_either_copy_is_found_before_the_next_checkpoint_and_undone(place: Place, worker: str) -> None:
    flip = Flip(place=place, stage=1, worker=worker, step=FLIPPED, microbatch=1)
    job = FlippedJob(manifest("None"), flip)
    job.run()
    check_found_and_undone(job)


@pytest.mark.parametrize("worker", [OWNER, SHADOW])
def test_without_checkpoints_it_is_found_within_32_steps_and_ends_the_job(worker: str) -> None:
    document = manifest("None")
    document["spec"]["training"]["steps"] = 40
    del document["spec"]["checkpoint"]
    job = FlippedJob(document, Flip(place=Place.PARAMETERS, stage=1, worker=worker, step=17, microbatch=1))
    job.run()
    assert job.finish is not None
    assert (job.finish.outcome, job.finish.reason) == (Outcome.FAILED, "ResultsDiffer")
    assert "of stage 1" in job.finish.message
    assert 17 <= job.state.step <= 32


@pytest.mark.parametrize("worker", ["w2", "w1"])
def test_a_bit_that_flips_while_a_checkpoint_is_copied_is_not_in_it(worker: str) -> None:
    """After the state's sums were told, at which all were equal, and before its copies are made."""
    flip = Flip(place=Place.PARAMETERS, stage=2, worker=worker, step=6, bit=9)
    job = FlippedJob(manifest("None"), flip)
    job.run()
    check_found_and_undone(job)


@pytest.mark.parametrize("place", [Place.FORWARD, Place.BACKWARD, Place.SUM])
def test_a_worker_that_is_wrong_every_time_is_found_by_a_spot_check(place: Place) -> None:
    """In the first step that is checked; the second time ends the job."""
    flip = Flip(place=place, stage=1, worker=OWNER, step=FLIPPED, microbatch=0, every_time=True)
    job = FlippedJob(manifest("None", mode="LazyForward"), flip)
    job.run()
    assert job.finish is not None
    assert job.finish.reason == "ResultsDiffer"
    assert f"in step {FLIPPED + 1}, microbatch 0 of stage 1" in job.finish.message
    assert job.state.guard.differences == 2


@pytest.fixture
def roomy_bubbles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time no bubble is measured: each layer fits into each."""
    monkeypatch.setattr(BubbleBudget, "fits", lambda budget, slot, idle, stage, layer: True)


@pytest.mark.usefixtures("roomy_bubbles")
def test_eager_forwards_whose_workers_are_lost_are_no_difference() -> None:
    """Shadows are killed as they begin with one; what they had done before is compared already."""
    document = manifest("Replace", mode="EagerForward")
    ahead = [fault for fault in Job(document).run().executed if fault.name == "RedundantForward"]
    assert ahead, "nothing was computed in advance"
    struck = 0
    for fault in ahead[:: max(1, len(ahead) // 8)]:
        job = Job(document, (fault,)).run()
        struck += job.state.membership.preemptions
        assert job.outcome is Outcome.COMPLETE, job.finish
        assert add_digests(job.digests) == undisturbed()
        assert (job.state.verification.found, job.state.verification.corrupt) == ({}, ())
    assert struck


@pytest.mark.usefixtures("roomy_bubbles")
@pytest.mark.parametrize("worker", [OWNER, SHADOW])
def test_a_wrong_forward_is_found_by_what_was_computed_in_advance(worker: str) -> None:
    job = flipped(manifest("Replace", mode="EagerForward"), worker, Place.FORWARD)
    check_undone(job, worker)
    assert job.state.verification.found == {"forward": 1}


def test_a_wrong_forward_is_found_in_its_step_and_undone() -> None:
    job = flipped(manifest("Replace"), OWNER, Place.FORWARD)
    check_undone(job, OWNER)
    assert job.state.verification.found == {"forward": 1}


ANYWHERE = [
    pytest.param("EagerBackward", "w1", Place.FORWARD, id="the shadow of the last stage"),
    pytest.param("EagerBackward", "w2", Place.FORWARD, id="its owner"),
    pytest.param("EagerForward", "w2", Place.FORWARD, id="its owner, forwards in advance", marks=pytest.mark.slow),
    pytest.param("LazyForward", "w2", Place.FORWARD, id="its owner, nothing in advance"),
    pytest.param("EagerForward", "w2", Place.LOSS_GRADIENT, id="what the loss sends back"),
    pytest.param("EagerForward", "w1", Place.LOSS_GRADIENT, id="that of the shadow", marks=pytest.mark.slow),
    pytest.param(
        "LazyForward", "w2", Place.LOSS_GRADIENT, id="that without anything in advance", marks=pytest.mark.slow
    ),
    pytest.param("EagerBackward", "w2", Place.BACKWARD, id="what a backward gives"),
    pytest.param("EagerBackward", "w2", Place.SUM, id="a gradient"),
    pytest.param(
        "EagerBackward", "w1", Place.SUM, id="that of the shadow, which cannot be repeated", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("mode", "worker", "place"), ANYWHERE)
def test_a_bit_of_a_mantissa_in_the_last_stage_is_found_and_undone(mode: str, worker: str, place: Place) -> None:
    """One that is too small for the loss: that has the same bits in fp32."""
    flip = Flip(place=place, stage=2, worker=worker, step=FLIPPED, microbatch=1, element=1, bit=3)
    job = FlippedJob(manifest("Replace", mode=mode), flip)
    job.run()
    check_undone(job, worker)


@pytest.mark.parametrize("worker", ["w1", "w0"])
@pytest.mark.parametrize("place", [Place.FORWARD, Place.LOSS_GRADIENT, Place.INPUT])
def test_of_two_workers_the_one_that_was_wrong_once_is_named_though_nothing_is_repeated(
    place: Place, worker: str
) -> None:
    """Its own result comes out otherwise when it computes it again at once, with the inputs that it had."""
    document = manifest("Report", mode="LazyForward", standby=0)
    document["spec"]["topology"]["stages"] = 2
    job = FlippedJob(document, Flip(place=place, stage=1, worker=worker, step=FLIPPED, microbatch=1, element=1, bit=21))
    job.run()
    assert job.flipped
    assert job.state.verification.corrupt == (worker,)
    assert not job.state.verification.disputes
    assert not job.state.membership.gone
    assert not job.state.checkpoints.counts.restores


def test_with_two_stages_backwards_are_compared_though_no_worker_is_ever_idle() -> None:
    document = manifest("Replace")
    document["spec"]["topology"]["stages"] = 2
    for stage in (0, 1):  # a lower bit may be gone, on some processors, when the next microbatch is added
        flip = Flip(place=Place.SUM, stage=stage, worker=f"w{stage}", step=FLIPPED, microbatch=1, bit=12)
        job = FlippedJob(document, flip)
        job.run()
        check_undone(job, f"w{stage}")


def test_a_shadow_that_does_not_come_to_its_own_result_again_is_replaced_and_nothing_is_repeated() -> None:
    job = flipped(manifest("Replace"), SHADOW, Place.FORWARD)
    check_undone(job, SHADOW)
    assert not job.state.checkpoints.counts.restores, "nobody has used what it computed in advance"


@pytest.mark.parametrize("worker", [OWNER, pytest.param(SHADOW, marks=pytest.mark.slow)])
def test_a_worker_that_is_wrong_every_time_is_told_by_a_third_one(worker: str) -> None:
    job = flipped(manifest("Replace"), worker, Place.FORWARD, every_time=True)
    check_undone(job, worker)
    assert job.flipped > 1


@pytest.mark.parametrize("mode", ["LazyForward", "EagerForward", "EagerBackward"])
def test_without_a_fault_nothing_differs_and_forwards_are_compared(mode: str) -> None:
    job = Job(manifest("Replace", mode=mode))
    job.run()
    assert not job.state.verification.found
    assert add_digests(job.digests) == undisturbed()
    compared = sum(node.inside.forward_sums.count for node in job.nodes.values() if node.engine.components)
    assert compared == STEPS * 4 * 3, "every forward of every stage"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("place", "stage"),
    [
        (("Forward", 0, 1, FLIPPED, 1), 1),
        (("RedundantForward", 0, 1, FLIPPED, 1), 0),
        (("OptimizerStep", 0, 1, FLIPPED, 0), 1),
        (("ReplicaUpdate", 0, 1, FLIPPED, 0), 0),
    ],
    ids=lambda value: str(value[0] if isinstance(value, tuple) else value),
)
def test_a_bit_that_flips_in_a_real_worker_is_undone(
    place: tuple[str, int, int, int, int], stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stage: that of the worker that is wrong."""
    document, mark, owners = manifest("Replace"), tmp_path / "flipped", dict[int, str]()
    document["spec"]["checkpoint"]["storage"]["uri"] = f"file://{tmp_path}/store"
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"mark": str(mark), "place": place}))
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)

    def note(job: Processes) -> None:
        if job.state.plan and not job.state.verification.found:
            owners.update({s: job.owner(0, s) for s in range(3)})

    processes = Processes(document, tmp_path, main="test_silent_corruption:flipping_worker", decide=note)
    job = asyncio.run(processes.run(seconds=180.0))
    assert mark.exists()
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.verification.corrupt == (owners[stage],), [e.message for e in job.emitted if e.warning]
    assert add_digests(digest for _, digest in job.state.ending.finished) == undisturbed()
