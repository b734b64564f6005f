"""Decisions that change a training: the same ones, with the same bits, on any grid and whoever is lost."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell
from bamboo_trainer import reference
from bamboo_trainer.decisions import Committed, Decision, Memory, frozen_for, reduce_on_plateau, stop_when
from bamboo_trainer.task import Task
from bamboo_trainer.training import TrainingConfig
from branching_job import Kind, kill_at_each, of_name, sweep
from manifest_kit import bamboojob, gpt_task, training
from stage_kit import small_task
from training_job import Fault, Job

STEPS, LAST, MICROBATCHES = 9, 7, 4


def slowing(done: Committed, memory: Memory) -> Decision:
    """Depends on every loss and norm so far, to their last bits."""
    seen = float(memory.get("seen") or 0.0) + (done.loss or 0.0) + (done.gradient_norm or 0.0)
    return Decision(learning_rate=1 / (1 + seen), memory={"seen": seen})


def after_seven(done: Committed, memory: Memory) -> Decision:
    return Decision(stop=done.step >= LAST)


def build(config: Mapping[str, Any]) -> Task:
    """Layer 0 is frozen for three steps; layers 0 and 2 share their bias."""
    decisions = {
        "slowing": slowing,
        "plateau": reduce_on_plateau(factor=0.5, patience=1, threshold=0.2),
        "unfreeze": frozen_for(3, "0.*", "3.bias"),
        "end": after_seven,
    }
    return small_task(
        layers=(lambda: nn.Linear(2, 3), nn.Tanh, lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 2)),
        tied=(("0.bias", "2.bias"),) if config.get("tied") else (),
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        learning_rate=lambda step: 0.1 / (1 + step),
        decisions={name: decisions[name] for name in config.get("decisions", decisions)},
    )


def manifest(stages: int, pipelines: int, mode: str = "LazyForward", **more: Any) -> dict[str, Any]:
    config = {name: more.pop(name) for name in ("decisions", "tied") if name in more}
    return bamboojob(
        task={"entrypoint": "test_decisions:build", "config": config},
        training=training(more.pop("steps", STEPS), 8, 2, maxGradientNorm=0.1),
        topology={"stages": stages, "pipelines": pipelines, **more.pop("topology", {})},
        redundancy={"mode": mode},
        **more,
    )


def ended(job: Job) -> tuple[Any, ...]:
    assert job.finish is not None
    assert job.finish.outcome is Outcome.COMPLETE, (job.finish, job.emitted)
    digests = {cell.stage: digest for cell, digest in job.state.ending.finished}
    return job.finish.reason, job.finish.message, job.state.progress.losses, add_digests(digests.values())


@cache
def calm(tied: bool = False) -> tuple[Any, ...]:
    return ended(Job(manifest(1, 1, tied=tied)).run())


def test_a_decision_ends_training_with_the_state_after_its_step() -> None:
    reason, message, losses, _ = calm()
    assert (reason, message) == (
        "EarlyStopped",
        "the task's decision 'end' ended training; the last one is that after 7 of 9 steps",
    )
    assert len(losses) == LAST
    longer = ended(Job(manifest(1, 1, steps=LAST, decisions=["slowing", "plateau", "unfreeze"])).run())
    assert longer[0] == "Complete"
    assert longer[2] == losses, "what is computed of the step after it counts for nothing"


@pytest.mark.parametrize(("grid", "tied"), [((2, 1), False), ((4, 1), True), ((2, 2), True), ((1, 3), False)])
def test_decisions_are_the_same_on_any_grid(grid: tuple[int, int], tied: bool) -> None:
    assert ended(Job(manifest(*grid, tied=tied)).run()) == calm(tied)


@sweep(of_name)
@pytest.mark.parametrize(("grid", "mode"), [((2, 2), "LazyForward"), ((4, 1), "EagerForward")])
def test_a_kill_at_an_instruction_around_a_decision_changes_nothing(grid: Any, mode: str, kind: Kind | None) -> None:
    expected = calm()
    names = {"ReportReady", "OptimizerStep", "ReplicaUpdate"}

    def judge(job: Job) -> None:
        assert ended(job) == expected

    def is_near(fault: Fault) -> bool:
        return fault.step in (2, 6, 7) and fault.name in names

    struck = kill_at_each(manifest(*grid, mode), is_near, judge, kind)
    assert {fault.name for fault in struck} == names


def test_two_losses_change_nothing() -> None:
    faults = (Fault("ReportReady", Cell(0, 0), 3, after=True), Fault("ReportReady", Cell(1, 1), 6, after=True))
    job = Job(manifest(2, 2, standby={"workers": 1}), faults).run()
    assert job.state.membership.preemptions == 2
    assert ended(job) == calm()


@pytest.mark.parametrize("first", [2, 5])
def test_a_job_that_goes_on_from_a_checkpoint_decides_as_it_would_have(first: int) -> None:
    """What decisions remember is a part of the state, layer by layer, so another split finds it."""
    checkpoint = {"storage": {"uri": "memory://store"}, "everySteps": 100}
    store = Job(manifest(2, 1, steps=first, tied=True, checkpoint=checkpoint)).run().store
    assert [one.step for one in store.committed] == [first]
    longer = Job(manifest(4, 1, tied=True, checkpoint=checkpoint), store=store).run()
    reason, message, losses, digest = ended(longer)
    assert (reason, message, digest) == (calm(tied=True)[0], calm(tied=True)[1], calm(tied=True)[3])
    assert losses.items() <= calm(tied=True)[2].items()


def test_numbers_are_those_of_plain_pytorch() -> None:
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=0.1, microbatches=4, micro_batch_size=2)
    losses, state = reference.train(build({}), config, STEPS)
    job = Job(manifest(2, 1)).run()
    assert len(losses) == LAST
    found = [job.state.progress.losses[step] for step in range(LAST)]
    assert found == pytest.approx(losses, rel=1e-5)
    stages = [s.stage for node in job.nodes.values() for s in node.states.values() if s.stage and s.owned]
    held = {name: tensor for stage in stages for name, tensor in stage.values.state_tensors().items()}
    for name, tensor in state.items():
        torch.testing.assert_close(held[name], tensor, rtol=1e-5, atol=1e-7)


def test_what_is_frozen_keeps_its_bits_and_counts_in_no_norm() -> None:
    document = manifest(2, 1, steps=3, decisions=["unfreeze"])
    job, task = Job(document).run(), build({})
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=0.1, microbatches=4, micro_batch_size=2)
    _, before = reference.train(task, config, 0)
    stages = [s.stage for node in job.nodes.values() for s in node.states.values() if s.stage and s.owned]
    held = {name: tensor for stage in stages for name, tensor in stage.values.state_tensors().items()}
    still = {name for name, tensor in before.items() if torch.equal(held[name], tensor)}
    assert still == {"layers.0.weight", "layers.0.bias", "layers.3.bias"}


# those that come with Bamboo


def said(decide: Any, *values: float | None) -> list[Decision]:
    """Told these losses, one after the other."""
    answers: list[Decision] = [decide(Committed(step=0), {})]
    for step, loss in enumerate(values, 1):
        answers.append(decide(Committed(step=step, loss=loss), answers[-1].memory))
    return answers[1:]


def test_a_plateau_reduces_the_rate_as_in_torch() -> None:
    losses = [3.0, 2.0, 2.0, 1.9999, 2.1, 2.2, 1.0, 1.0, 1.0, 1.0, 0.999999, 1.0]
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.2)
    expected = []
    for loss in losses:
        scheduler.step(loss)
        expected.append(optimizer.param_groups[0]["lr"])
    answers = said(reduce_on_plateau(factor=0.5, patience=1, least=0.2), *losses)
    assert [answer.learning_rate for answer in answers] == expected
    assert len(set(expected)) == 4


def test_a_plateau_of_an_evaluation_counts_evaluations_only() -> None:
    decide = reduce_on_plateau("evaluation/accuracy", factor=0.5, patience=0, largest=True)
    memory: Memory = {}
    rates = []
    for step, accuracy in enumerate([None, 0.5, None, 0.6, 0.6, None], 1):
        metrics = {} if accuracy is None else {"accuracy": accuracy}
        answer = decide(Committed(step=step, loss=1.0, evaluation=metrics), memory)
        memory = answer.memory
        rates.append(answer.learning_rate)
    assert rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_limit_ends_training() -> None:
    assert [one.stop for one in said(stop_when(below=1.0), 2.0, None, 1.0, 0.5)] == [False, False, False, True]
    assert [one.stop for one in said(stop_when(above=1.0), 1.0, 1.5)] == [False, True]
    with pytest.raises(ValueError, match="expected below or above"):
        stop_when()


# in real processes


OWN = """\
import dataclasses

from bamboo_trainer.decisions import Decision, frozen_for, reduce_on_plateau
from bamboo_trainer.models import gpt


def end(done, memory):
    return Decision(stop=done.step >= 15)


def build(config):
    decisions = {"plateau": reduce_on_plateau(patience=1), "unfreeze": frozen_for(5, "0.*", "1.*"), "end": end}
    return dataclasses.replace(gpt.build(config), decisions=decisions)
"""


def test_killed_workers_and_another_grid_end_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "own_decisions.py").write_text(OWN)
    task = {"entrypoint": "own_decisions:build", "config": gpt_task(dModel=16, context=8)["config"]}
    job = bamboojob("decided", task=task, training=training(24, 8, 2), topology={"stages": 3}, standby={"workers": 1})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    kills = ("--preempt", "at:4:0", "--preempt", "at:9:0", "--preempt", "at:13:1")
    command = [sys.executable, "-m", "bamboo", "run", str(tmp_path / "job.yaml"), "--json", "--verify", *kills]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["reason"], said["preemptions"]) == ("EarlyStopped", 3), said
    assert "the last one is that after 15 of 24 steps" in said["message"]
