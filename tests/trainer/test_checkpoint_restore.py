"""Real stages go on from a checkpoint: after a loss that redundancy does not cover, or in a new job of another grid."""

from functools import cache
from typing import Any

import msgspec
import pytest

from bamboo.control.digests import add_digests
from bamboo.coordinator.events import Outcome
from bamboo.planning.plan import ROOT
from bamboo_trainer.transport.base import Arrived
from bamboo_trainer.transport.frames import Address, Frame, FrameKind
from bamboo_trainer.transport.payloads import Commit
from training_job import Job, MemoryStore

STEPS = 7


def manifest(stages: int, pipelines: int, *, steps: int = STEPS, every: int | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "task": {
            "entrypoint": "bamboo_trainer.models.mlp:build",
            "config": {"width": 16, "blocks": 4, "samples": 32},
        },
        "training": {"steps": steps, "globalBatchSize": 8, "microBatchSize": 2, "gradientGroups": 2},
        "topology": {"stages": stages, "pipelines": pipelines},
        "elastic": {
            "minPipelines": pipelines,
            "maxPipelines": pipelines,
            "minStages": stages,
            "stabilizationSeconds": 0,
        },
    }
    if every:
        spec["checkpoint"] = {"storage": {"uri": "memory://x"}, "everySteps": every}
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": "kept"}, "spec": spec}


def result(job: Job) -> tuple[str, dict[int, float]]:
    """Of the whole model, however it is split; and the losses of the steps that this job has done."""
    assert job.finish is not None
    assert job.finish.outcome is Outcome.COMPLETE, job.finish
    return add_digests(job.digests), {step: loss for step, loss in job.state.losses.items() if loss is not None}


@cache
def undisturbed() -> tuple[str, dict[int, float]]:
    return result(Job(manifest(3, 1)).run())


class Disaster:
    """Once, when so many steps are committed, these cells' holders die together. cells: None: all workers die."""

    def __init__(self, step: int, stage: int | None) -> None:
        self.step, self.stage, self.struck = step, stage, False

    def __call__(self, job: Job) -> None:
        plan = job.state.plan
        if self.struck or plan is None or job.state.step < self.step:
            return
        self.struck = True
        cells = [cell for cell in plan.cells() if self.stage in (None, cell.stage)]
        for worker in sorted({w for cell in cells for w in plan.at(cell).holders}):
            job.kill(worker)


@pytest.mark.parametrize(("pipelines", "stage"), [(1, 1), (1, 0), (2, 2), (1, None)])
def test_a_job_that_loses_a_stage_ends_with_the_same_bits(pipelines: int, stage: int | None) -> None:
    disaster = Disaster(5, stage)
    job = Job(manifest(3, pipelines, every=3), decide=disaster).run()
    assert disaster.struck
    assert result(job) == undisturbed()
    assert sum(job.state.checkpoints.counts.restores.values()) == 1
    assert job.state.checkpoints.counts.repeated > 0
    assert (job.store.committed[0].step, job.store.committed[-1].step) == (3, STEPS)


@pytest.mark.parametrize(("before", "after"), [((3, 1), (2, 2)), ((2, 2), (4, 1))])
def test_another_grid_goes_on_with_the_same_bits(before: tuple[int, int], after: tuple[int, int]) -> None:
    store = MemoryStore()
    Job(manifest(*before, steps=4, every=4), store=store).run()
    assert [one.step for one in store.committed] == [4]
    job = Job(manifest(*after, every=100), store=store).run()
    digest, losses = undisturbed()
    assert result(job) == (digest, {step: loss for step, loss in losses.items() if step >= 4})
    assert {fault.step for fault in job.executed if fault.name == "Forward"} == set(range(4, STEPS))


def test_a_job_that_loses_a_stage_before_its_first_checkpoint_ends() -> None:
    job = Job(manifest(3, 1, every=100), decide=Disaster(3, 1)).run()
    assert job.finish is not None
    assert job.finish.outcome is Outcome.UNRECOVERABLE
    assert "there is no checkpoint to go back to" in job.finish.message


def test_what_belongs_to_given_up_states_is_dropped_and_what_comes_early_waits() -> None:
    """A commit with another norm: of an older origin, which must not count, and of one whose plan is on its way."""

    def decide(job: Job) -> None:
        disaster(job)
        plan = job.state.plan
        if plan is None or plan.origin == 1 or said or job.state.step < 5:
            return
        for node in job.nodes.values():
            inside = node.engine.components if node.alive else None
            if inside is None or inside.plan.current.origin != plan.origin:
                continue
            step = inside.step
            wrong = Commit(norm=1e9, loss=0.0, microbatches=4, generation=0, epoch=plan.epoch)
            address = Address(FrameKind.COMMIT, *ROOT, step)
            for origin in (1, plan.origin + 1):
                peer = next(w for w in sorted(plan.worker_ids()) if w != node.name)
                frame = Frame(address=address, epoch=plan.epoch, origin=origin, payload=msgspec.to_builtins(wrong))
                node.engine.handle(Arrived(peer, frame))
                assert step not in inside.committer.log.commits
            said.append(node.name)

    said: list[str] = []
    disaster = Disaster(5, 1)
    job = Job(manifest(3, 1, every=3), decide=decide).run()
    assert said
    assert result(job) == undisturbed()
