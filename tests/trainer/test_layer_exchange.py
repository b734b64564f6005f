"""Layers that are split anew over fewer or more workers while the job trains: the same bits, whoever is lost."""

import weakref
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
from torch import nn

from bamboo_trainer.stage.stage import Stage
from branching_job import BranchingJob, Kind, each_way, of_name, sweep
from manifest_kit import bamboojob, gpt_task, mlp_task, training
from replica_kit import copies
from stage_kit import small_task
from training_job import Fault, Job, MemoryStore

STAGES, STEPS = 4, 24
LATE = 18  # the last step but a few, in which none begins anew
LAYER_SECONDS = 0.1  # that workers say each layer takes
MLP = mlp_task(blocks=6)


def manifest(task: dict[str, Any], every: int | None = None, **elastic: int) -> dict[str, Any]:
    document = bamboojob(
        task=task,
        training=training(STEPS, 4, 2, gradientGroups=2),
        topology={"pipelines": 1},
        elastic={"maxWorkers": STAGES, "stabilizationSeconds": 1, **elastic},
    )
    if every:
        document["spec"]["checkpoint"] = {"storage": "memory://x", "everySteps": every}
    return document


def _job(document: dict[str, Any], **more: Any) -> Job:
    return Job(document, layer_seconds=LAYER_SECONDS, **more)


@cache
def undisturbed(tied: bool = False) -> tuple[str, dict[int, float]]:
    return result(_job(manifest(gpt(tied) if tied else MLP)).run())


def gpt(tied: bool) -> dict[str, Any]:
    return gpt_task(dModel=16, blocks=6, context=8, tieEmbeddings=tied)


def result(job: Job) -> tuple[str, dict[int, float]]:
    return job.bits, dict(job.state.progress.losses)


def alive(job: Job) -> int:
    return sum(node.alive for node in job.nodes.values())


@dataclass
class Shortage:
    """A worker is lost at a step, and there is no other one until a later step; then, or never, there are nodes again.

    turns: since the layers began to be split anew.
    """

    lost_at: int = 12
    over_at: int | None = None
    stages: list[int] = field(default_factory=list)
    turns: int = -1
    _lost: bool = False
    _step: int = 0

    def __call__(self, job: Job) -> None:
        state, plan = job.state, job.state.plan
        if plan is None:
            return
        if not self.stages or self.stages[-1] != len(plan.stages):
            self.stages.append(len(plan.stages))
        if state.stragglers.estimate is None and state.step > self._step:
            self._step, job.now = state.step, job.now + 1.0  # until it is measured what layers take
        if not self._lost and state.step >= self.lost_at:
            self._lost, job.capacity = True, alive(job) - 1
            job.kill(plan.pipelines[-1][1].owner)
        if self.over_at is not None and state.step >= self.over_at:
            job.capacity = 1000
        calm = state.grids.resize and all(copies(plan, state.plans.synced, c) > 0 for c in plan.cells())
        if calm and not state.splits.resplit and not plan.sources:
            job.now += 1.0  # the workers have been too few for long enough
        if state.splits.resplit is not None or self.turns >= 0:
            self.turns += 1


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fewer_workers_than_stages_train_on_with_fewer_stages_and_the_same_bits(tied: bool) -> None:
    shortage = Shortage(over_at=18)
    job = _job(manifest(gpt(tied) if tied else MLP), decide=shortage).run()
    assert shortage.stages == [4, 3, 4]
    assert result(job) == undisturbed(tied)
    assert job.state.checkpoints.counts.repeated == 0
    forwards = [fault for fault in job.executed if fault.name == "Forward" and not fault.after]
    assert {f.step for f in forwards} == set(range(STEPS))


@pytest.mark.parametrize("strike", [3, 8])
def test_when_all_are_lost_meanwhile_the_job_goes_back_to_its_checkpoint(strike: int) -> None:
    shortage = Shortage()

    def decide(job: Job) -> None:
        shortage(job)
        if shortage.turns == strike and not struck:
            struck.append(True)
            for worker in list(job.nodes):
                job.kill(worker)
            job.capacity = 3  # and so many are left: it goes on with three stages

    struck: list[bool] = []
    job = _job(manifest(MLP, every=2), decide=decide, store=MemoryStore()).run()
    assert struck
    digest, losses = result(job)
    assert (digest, losses) == undisturbed()
    assert job.state.checkpoints.counts.restores
    assert len(job.plan.stages) == 3


def test_the_stages_before_are_gone_when_the_new_ones_are_built() -> None:
    """There may not be memory for both."""
    shortage = Shortage()
    before: dict[str, list[weakref.ref[Stage]]] = {}
    looked: list[str] = []

    def decide(job: Job) -> None:
        shortage(job)
        for node in job.nodes.values():
            if node.alive and node.engine.components:
                states = node.engine.components.states.by_stage.values()
                before[node.name] = [weakref.ref(state.stage) for state in states if state.stage]
            elif node.alive and node.engine.plan_told and node.name in before:
                looked.append(node.name)
                assert [ref() for ref in before[node.name]] == [None] * len(before[node.name])

    job = _job(manifest(MLP), decide=decide).run()
    assert looked
    assert result(job) == undisturbed()


def test_a_state_that_only_the_state_dict_shows_is_not_sent() -> None:
    """It need not even be a tensor; nothing is restored from it."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    task = small_task(layers=[partial(Extra, 2, 2)] * 6)
    job = _job(manifest({"entrypoint": "given:build"}), task=task, decide=Shortage()).run()
    assert len(job.plan.stages) == 3


ANEW = "begins again there"


def slow_steps(job: Job, fault: Fault) -> None:
    """Let a step take about as long as its layers, all of it at its end."""
    if fault.name == "ReportReady" and not fault.after:
        job.now += LAYER_SECONDS * 2


def begun_anew(job: Job) -> int:
    """How often a step began anew; the job has the bits of an undisturbed one."""
    assert result(job) == undisturbed()
    return sum(ANEW in event.message for event in job.emitted)


@sweep(of_name)
def test_a_step_in_which_a_worker_is_lost_begins_anew_with_the_same_bits(kind: Kind | None) -> None:
    class Killed(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            slow_steps(self, fault)
            if fault.step != LATE or not self.branch(fault, kind and kind(fault)):
                return False
            self.capacity = alive(self) - 1
            return True

    def make() -> Killed:
        return Killed(manifest(MLP), layer_seconds=LAYER_SECONDS, decide=Shortage(lost_at=STEPS))

    answers = each_way(make, begun_anew)
    assert set(answers.values()) <= {0, 1}, "once at most"
    assert sum(answers.values()) > len(answers) / 2
