"""A correct job is never ended by a spot check: in every mode, with every feature, whoever is killed anywhere."""

from typing import Any

import pytest
import torch
from torch import nn

from bamboo_core.coordinator.events import Outcome
from bamboo_trainer import reference
from bamboo_trainer.lora import with_lora
from branching_job import kill_at_each, of_name, sweep
from manifest_kit import bamboojob, gpt_task, training
from stage_kit import small_task
from training_job import Fault, Job

MODES = ["None", "LazyForward", "EagerForward", "EagerBackward"]
CHECKED = 5  # the first step that is


def manifest(stages: int, pipelines: int, mode: str, steps: int = 7, **spec: Any) -> dict[str, Any]:
    given = {"maxGradientNorm": 1.0, **spec.pop("training", {})}
    topology = {"stages": stages, "pipelines": pipelines, **spec.pop("topology", {})}
    task = spec.pop("task", gpt_task(dModel=16, context=8, dropout=0.1, tieEmbeddings=True))
    spec = {"standby": {"workers": 0}, **spec}
    return bamboojob(
        task=task, training=training(steps, 8, 2, **given), topology=topology, redundancy={"mode": mode}, **spec
    )


def checks(job: Job) -> list[Fault]:
    return [fault for fault in job.executed if fault.name == "SpotCheck" and not fault.after]


def check_calm(document: dict[str, Any]) -> None:
    job = Job(document).run()
    assert job.outcome is Outcome.COMPLETE, job.emitted
    stages = {fault.cell.stage for fault in checks(job)}
    grid = document["spec"]["topology"]["stages"] * document["spec"].get("worker", {}).get("devices", 1)
    assert stages == set(range(grid)), "a stage was not checked"


FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {"training": {"precision": "bf16"}},
    "pure bf16": {
        "training": {"precision": "bf16", "parameterPrecision": "bf16", "boundaryPrecision": "bf16"},
    },
    "fp16": {"training": {"precision": "fp16"}},
    "bf16 gradients": {"training": {"gradientPrecision": "bf16"}},
    "ZBH1": {"topology": {"schedule": "ZBH1"}},
    "averages": {"training": {"emaDecay": 0.9}},
    "a group for each microbatch": {"training": {"gradientGroups": 4}},
    "devices": {"worker": {"devices": 2}},
    "checkpointed": {"task": gpt_task(dModel=16, context=8, dropout=0.1, checkpoint=True)},
}


@pytest.mark.parametrize(
    ("grid", "mode"), [((1, 1), "LazyForward"), ((1, 2), "None"), *(((2, 2), mode) for mode in MODES)]
)
def test_a_calm_job_completes(grid, mode) -> None:
    check_calm(manifest(*grid, mode))


@pytest.mark.parametrize(
    ("feature", "mode"),
    [*((feature, "EagerBackward") for feature in FEATURES), ("bf16", "LazyForward"), ("ZBH1", "LazyForward")],
)
def test_a_job_completes_with_each_feature(feature, mode) -> None:
    check_calm(manifest(2, 1, mode, **FEATURES[feature]))


def running(config: object) -> Any:
    """Buffers that forwards update, what is frozen, what is not used, and outputs without a gradient."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.idle = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.frozen, torch.arange(3).expand_as(x)

    class Both(nn.Module):
        def forward(self, x, numbers):
            return x + numbers

    return small_task(
        layers=(
            lambda: nn.Linear(2, 3),
            lambda: nn.BatchNorm1d(3),
            Halves,
            Both,
            lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 2)),
        ),
        costs=[1] * 5,
    )


def adapted(config: object) -> Any:
    layers = [lambda: nn.Linear(2, 2)] * 4
    return with_lora(small_task(layers=layers, costs=[1] * 4), rank=1, alpha=1, targets=("*",))


@pytest.mark.parametrize(("build", "stages"), [(running, 1), (running, 4), (adapted, 2)])
def test_buffers_and_frozen_parameters_are_no_difference(build, stages, monkeypatch) -> None:
    monkeypatch.setattr(reference, "build_special", build, raising=False)
    task = {"entrypoint": "bamboo_trainer.reference:build_special"}
    check_calm(manifest(stages, 1, "LazyForward", task=task))


@sweep(of_name)
@pytest.mark.parametrize(
    ("grid", "mode", "schedule"),
    [
        ((2, 1), "LazyForward", "1F1B"),
        pytest.param((3, 1), "EagerBackward", "1F1B", marks=pytest.mark.slow),
        pytest.param((2, 1), "EagerForward", "ZBH1", marks=pytest.mark.slow),
        pytest.param((1, 2), "None", "1F1B", marks=pytest.mark.slow),
        pytest.param((2, 2), "LazyForward", "1F1B", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_each_place_of_a_checked_step_changes_no_bit(grid, mode, schedule, kind) -> None:
    document = manifest(*grid, mode, topology={"schedule": schedule})
    calm = Job(document).run()

    def judge(job: Job) -> None:
        assert job.outcome is Outcome.COMPLETE, job.emitted
        assert job.digests == calm.digests

    killed = kill_at_each(document, lambda fault: fault.step == CHECKED, judge, kind)
    assert "SpotCheck" in {fault.name for fault in killed}
