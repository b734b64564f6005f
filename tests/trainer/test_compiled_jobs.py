"""Jobs whose layers are compiled: equal bits on every grid, with either schedule, and after kills."""

import functools
import signal
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell
from branching_job import kill_at_each
from manifest_kit import bamboojob, gpt_task, training
from processes import run_with_faults
from training_job import Fault, Job, check_same_bits

pytest_plugins = ["compiled_fixtures"]
pytestmark = [
    pytest.mark.usefixtures("compiled_cache"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's own, when its compiler is imported
]
STEPS = 4
SECONDS = 300.0  # a job of processes, which compile


def manifest(stages: int, pipelines: int, *, mode: str = "EagerForward", **more: Any) -> dict[str, Any]:
    schedule = more.pop("schedule", "1F1B")
    return bamboojob(
        task=gpt_task(dModel=16, context=8, blocks=2, **more.pop("task", {})),
        training=training(STEPS, 8, 2, maxGradientNorm=1.0, **({"compile": True} | more)),
        topology={"stages": stages, "pipelines": pipelines, "schedule": schedule},
        redundancy={"mode": mode},
    )


@functools.cache
def undisturbed(stages: int = 1, **more: Any) -> Job:
    return Job(manifest(stages, 1, **more)).run()


@pytest.mark.parametrize(
    ("stages", "pipelines", "more"),
    [
        pytest.param(2, 1, {}, marks=pytest.mark.slow),
        pytest.param(1, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"mode": "EagerBackward"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"schedule": "ZBH1"}, marks=pytest.mark.slow),
        (3, 1, {"schedule": "ZBH1", "mode": "EagerBackward"}),
    ],
)
def test_the_grid_and_the_schedule_change_no_bit(stages: int, pipelines: int, more: dict[str, Any]) -> None:
    check_same_bits(undisturbed(), Job(manifest(stages, pipelines, **dict(more))).run())


def test_losses_are_those_of_layers_that_are_not_compiled() -> None:
    assert list(undisturbed().state.progress.losses.values()) == pytest.approx(
        list(undisturbed(compile=False).state.progress.losses.values()), rel=1e-4
    )


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("ZBH1", ("BackwardInput", "BackwardWeight")),
        pytest.param("1F1B", ("Backward",), marks=pytest.mark.slow),
    ],
)
def test_a_kill_changes_no_bit(schedule: str, parts: tuple[str, ...]) -> None:
    points = {"Forward": 1, **dict.fromkeys(parts, 1), "SyncReplicas": 0, "OptimizerStep": 0}
    faults = {Fault(name, Cell(0, 1), 2, microbatch) for name, microbatch in points.items()}
    judge = functools.partial(check_same_bits, undisturbed())
    assert kill_at_each(manifest(2, 2, schedule=schedule), faults.__contains__, judge).keys() == faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "microbatch"),
    [
        ("BackwardWeight", 1, 1),
        ("Backward", 1, 1),
        ("BackwardInput", 1, 2),
        ("Forward", 0, 0),
        ("Forward", 1, 2),
        ("Backward", 0, 3),
        ("SyncReplicas", 0, 0),
        ("ReportReady", 1, 0),
        ("OptimizerStep", 0, 0),
        ("OptimizerStep", 1, 0),
    ],
)
def test_processes_train_to_the_same_bits_after_a_kill(
    name: str,
    stage: int,
    microbatch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = (name, 0, stage, 2, microbatch, signal.SIGKILL)
    schedule = "ZBH1" if name in ("BackwardInput", "BackwardWeight") else "1F1B"
    job = run_with_faults(manifest(2, 1, schedule=schedule), tmp_path, monkeypatch, fault, seconds=SECONDS)
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.progress.losses == undisturbed().state.progress.losses
    assert dict(job.state.ending.finished) == dict(undisturbed(2).state.ending.finished)
    assert job.state.membership.preemptions == 1
