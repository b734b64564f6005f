"""A real worker process that is slow: it is replaced or gets fewer layers while the job trains, with the same bits."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import Outcome
from bamboo_trainer.models import mlp
from bamboo_trainer.task import Task
from folders import TASK_PATH
from manifest_kit import bamboojob, training
from processes import Processes, run
from training_job import Job

MARK = "mark"  # an entry of task.config: the file, with a process id
SECONDS, SLOWER = 0.01, 4  # of a layer's forward


def build(config: Mapping[str, Any]) -> Task:
    rest = dict(config)
    mark = Path(rest.pop(MARK))
    task = mlp.build(rest)
    return replace(task, layers=tuple(_sluggish(factory, mark) for factory in task.layers))


def _sluggish(factory: Callable[[], nn.Module], mark: Path) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        layer = factory()
        layer.register_forward_pre_hook(lambda *_: _sleep(mark))
        return layer

    return made


def _sleep(mark: Path) -> None:
    try:
        named = mark.read_text()
    except FileNotFoundError:
        return
    time.sleep(SECONDS * (SLOWER if named == str(os.getpid()) else 1))


CONFIG = {"width": 16, "blocks": 4, "samples": 64}
STEPS = 250


def manifest(task: dict[str, Any], stages: int = 2, standby: int = 0) -> dict[str, Any]:
    return bamboojob(
        task=task,
        training=training(STEPS, 8, 2, gradientGroups=2),
        topology={"stages": stages, "schedule": "1F1B"},
        standby={"workers": standby},
        elastic={"minWorkers": 2, "maxWorkers": 2, "stabilizationSeconds": 1},
    )


class Slowing:
    """As soon as the job trains one worker is slow; when that has been met, nobody is. layers: that it runs then."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.slow, self.layers = mark, "", -1

    def __call__(self, job: Processes) -> None:
        plan = job.state.plan
        if plan is None or job.state.step == 0:
            return
        if not self.slow:
            self.slow = job.owner(len(plan.pipelines) - 1, len(plan.stages) - 1)
            self.mark.write_text(str(job.pool.pid(self.slow)))
        elif self.layers < 0 and not plan.sources and (plan.moved or self.slow not in plan.holders()):
            ranges = [plan.stages[c.stage] for c in plan.owned_by(self.slow)]
            self.layers = sum(end - first for first, end in ranges)
            self.mark.unlink()


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("stages", "standby", "told"),
    [(2, 0, "Rebalancing"), (2, 1, "StragglerReplaced"), (1, 0, "StragglerReplacementRequested")],
)
def test_a_slow_process_gets_fewer_layers_or_is_replaced_and_the_bits_are_the_same(
    stages: int, standby: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole-model workers have no layers to give to others: one more is asked for, which takes the slow one's place."""
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)
    slowing = Slowing(tmp_path / "mark")
    task = {"entrypoint": "test_slow_workers:build", "config": {**CONFIG, "mark": str(slowing.mark)}}
    job = run(manifest(task, stages, standby), tmp_path, slowing, seconds=800.0)
    assert job.outcome is Outcome.COMPLETE, job.emitted
    reasons = [e.reason for e in job.emitted]
    assert {"StragglerFound", told} <= set(reasons)
    if told == "Rebalancing":
        assert 0 < slowing.layers < 3, "of six layers"
    else:
        assert ("StragglerReplaced" in reasons, slowing.layers) == (True, 0)
        assert slowing.slow in job.exits, "it has left"
    expected = Job(manifest({"entrypoint": "bamboo_trainer.models.mlp:build", "config": CONFIG}, stages)).run()
    assert job.state.progress.losses == expected.state.progress.losses
    digests = [digest for cell, digest in job.state.ending.finished if cell.pipeline == 0]
    assert add_digests(digests) == add_digests(expected.digests)
