"""Returns to a checkpoint, after losses that redundancy does not cover, or in a new job on another grid."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import pytest

from bamboo_core.control.protocol import PartsWritten, Received
from bamboo_core.planning.plan import ROOT
from bamboo_trainer.frames import Address, Commit, Frame, FrameKind
from bamboo_trainer.transport.base import Arrived
from manifest_kit import bamboojob, mlp_task, training
from training_job import Job, MemoryStore, Node

STEPS = 8


def manifest(stages: int, pipelines: int, *, steps: int = STEPS, every: int | None = None) -> dict[str, Any]:
    return bamboojob(
        task=mlp_task(blocks=4),
        training=training(steps, 4, 2, gradientGroups=2),
        topology={"stages": stages, "pipelines": pipelines},
        **({"checkpoint": {"storage": "memory://x", "everySteps": every}} if every else {}),
    )


def result(job: Job) -> tuple[str, dict[int, float]]:
    """Return the digest of the whole model, and this job's losses by step."""
    return job.bits, {step: loss for step, loss in job.state.progress.losses.items() if loss is not None}


@cache
def undisturbed() -> tuple[str, dict[int, float]]:
    return result(Job(manifest(3, 1)).run())


@dataclass
class Disaster:
    """A hook that kills all holders of a stage's cells after `step` committed steps. stage: None for all stages."""

    step: int
    stage: int | None
    struck: bool = False

    def __call__(self, job: Job) -> None:
        plan = job.state.plan
        if self.struck or plan is None or job.state.step < self.step:
            return
        self.struck = True
        cells = [cell for cell in plan.cells() if self.stage in (None, cell.stage)]
        for worker in sorted({w for cell in cells for w in plan.at(cell).holders}):
            job.kill(worker)


@pytest.mark.parametrize(("pipelines", "stage"), [(1, 0), (2, 2), (1, None)])
def test_a_job_that_loses_a_stage_ends_with_the_same_bits(pipelines: int, stage: int | None) -> None:
    disaster = Disaster(5, stage)
    job = Job(manifest(3, pipelines, every=3), decide=disaster).run()
    assert disaster.struck
    assert result(job) == undisturbed()
    assert sum(job.state.checkpoints.counts.restores.values()) == 1
    assert job.state.checkpoints.counts.repeated > 0
    assert (job.store.committed[0].step, job.store.committed[-1].step) == (3, STEPS)


@dataclass
class SlowStore:
    """A hook that withholds the reports on one step's written files until all cells have finished."""

    step: int
    late: list[Any] = field(default_factory=list)

    def __call__(self, job: Job) -> None:
        told = [event for event in job.inbox if self._is_held_up(event)]
        self.late += told
        for event in told:
            job.inbox.remove(event)
        plan = job.state.plan
        if plan and len(job.state.ending.finished) == len(plan.cells()):
            job.inbox.extend(self.late)
            self.late.clear()
            self.step = -1

    def _is_held_up(self, event: Any) -> bool:
        said = event.message if isinstance(event, Received) else None
        return isinstance(said, PartsWritten) and said.checkpoint.step == self.step


@pytest.mark.parametrize("grid", [(3, 1), (2, 2)])
def test_the_last_state_is_kept_after_one_that_is_still_being_written_at_the_end(grid: tuple[int, int]) -> None:
    store = SlowStore(6)
    job = Job(manifest(*grid, every=6), decide=store).run()
    assert [one.step for one in job.store.committed] == [6, STEPS]
    assert result(job) == undisturbed()
    assert job.state.checkpoints.counts.abandoned == {}
    again = Job(manifest(2, 1, every=6), store=job.store).run()
    assert result(again) == (undisturbed()[0], {}), "nothing is left to train"
    assert [one.step for one in again.store.committed] == [6, STEPS], "and nothing to keep"


def test_what_belongs_to_given_up_states_is_dropped_and_what_comes_early_waits() -> None:
    """A worker drops commits from before a return to a checkpoint, and does not apply commits of a plan it lacks."""

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
            wrong = Commit(norm=1e9, loss=0.0, microbatches=2, generation=0, epoch=plan.epoch)
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


# copies in host memory


def alive(job: Job) -> list[Node]:
    return [node for node in job.nodes.values() if node.alive]


def held(job: Job, step: int) -> set[int]:
    """Return the layers of a step's checkpoint that live workers hold copies of."""
    copies = [node.engine.copies.held for node in alive(job)]
    return {layer for of in copies for one, layers in of.items() if one.step == step for layer in layers}


@dataclass
class Loss(Disaster):
    """A disaster that records the survivors' copies of layers. more: after how many calls, counted from the plan that
    returns to the checkpoint, another worker is lost; None: never. forgetful: the survivors drop their copies.
    """

    more: int | None = None
    forgetful: bool = False
    kept: set[int] = field(default_factory=set)
    checkpoint: int = 3
    turns: int = 0
    second: str = ""
    read: int = 0
    known: set[int] = field(default_factory=set)  # to the coordinator, before the loss

    def __call__(self, job: Job) -> None:
        if not self.struck:
            copies = job.state.copies.held.values()
            self.known = {layer for who in copies for layers in who.values() for layer in layers}
        super().__call__(job)
        if self.struck and not self.kept:
            self.kept, self.read = held(job, self.checkpoint), len(job.store.read)
            for node in alive(job) if self.forgetful else ():
                node.engine.drop_copies(job.store.committed)
        plan = job.state.plan
        if self.more is None or plan is None or plan.origin == 1:
            return
        if self.turns == self.more:
            self.second = min(w for w in plan.holders() if job.nodes[w].alive)
            job.kill(self.second)
        self.turns += 1


def test_who_lives_goes_back_with_copies_in_memory_and_reads_only_what_nobody_has() -> None:
    loss = Loss(5, 1)
    job = Job(manifest(3, 1, every=3), decide=loss).run()
    assert result(job) == undisturbed()
    layers = set(range(len(job.task.layers)))
    assert 0 < len(loss.kept) < len(layers)
    assert {layer for _, layer in job.store.read} == layers - loss.kept
    told = next(one.message for one in job.emitted if one.reason == "RolledBack")
    assert f"{len(loss.kept)} of {len(layers)} layers from memory" in told


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_another_loss_on_the_way_back(turns: int) -> None:
    loss = Loss(5, 1, more=turns)
    job = Job(manifest(3, 1, every=3), decide=loss).run()
    assert result(job) == undisturbed()
    assert loss.second
    reasons = [one.reason for one in job.emitted]
    assert ("RollingBack" in reasons) == (turns < 2), "as soon as all have begun a loss is an ordinary takeover"


def test_who_has_dropped_its_copies_says_so_and_the_store_is_read() -> None:
    job = Job(manifest(3, 1, every=3), decide=Loss(5, 1, forgetful=True)).run()
    assert result(job) == undisturbed()
    assert {layer for _, layer in job.store.read} == set(range(len(job.task.layers)))


def test_what_a_job_has_read_at_its_start_is_kept_for_the_way_back() -> None:
    store = MemoryStore()
    Job(manifest(2, 2, steps=4, every=4), store=store).run()
    loss = Loss(6, 1, checkpoint=4)
    job = Job(manifest(3, 1, every=100), store=store, decide=loss).run()
    assert result(job)[0] == undisturbed()[0]
    layers = set(range(len(job.task.layers)))
    assert 0 < len(loss.kept) < len(layers)
    assert loss.known == {layer for _, layer in store.read[: loss.read]} == layers
    assert {layer for _, layer in store.read[loss.read :]} == layers - loss.kept


def test_copies_are_of_the_newest_checkpoint_only_and_each_layer_is_kept_once() -> None:
    kept: dict[int, list[int]] = {}

    def decide(job: Job) -> None:
        copies = [node.engine.copies.held for node in alive(job)]
        steps = {one.step for of in copies for one in of}
        assert len(steps) <= 2, "the newest one, and the one that is being written"
        if [one.step for one in job.state.checkpoints.kept] == [4] and not job.state.checkpoints.writers:
            kept.update(
                {s: [layer for of in copies for one in of if one.step == s for layer in of[one]] for s in steps}
            )

    job = Job(manifest(3, 2, every=4), decide=decide).run()
    assert sorted(kept[4]) == list(range(len(job.task.layers)))
