"""`--load`: a task is tried before anybody pays for it, and its workers' memory is counted without running anything."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.job.manifest import parse_manifest
from bamboo.local.trainer_calls import task_check, trainer_process
from bamboo.local.trainer_calls.task_check import check_task
from bamboo_trainer import reference
from bamboo_trainer.check import check
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.task import Task
from stage_kit import small_task

ROOT = Path(__file__).parents[2]
SPIRALS: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "spirals.yaml").read_text())


def manifest(**spec: Any) -> dict[str, Any]:
    document = copy.deepcopy(SPIRALS)
    document["spec"] |= spec
    return document


def of(task: Task, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> dict[str, Any]:
    """The check of a job of that task."""
    monkeypatch.setattr(reference, "build_it", lambda config: task, raising=False)
    training = {"steps": 3, "globalBatchSize": 8, "microBatchSize": 2}
    default = {"task": {"entrypoint": "bamboo_trainer.reference:build_it"}, "training": training}
    return check(manifest(**{**default, "topology": {"stages": 2}, **spec}))


class Looks(nn.Module):
    """Its way depends on values, so it cannot be run without data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool((x > 0).any()) else x


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (
            {"task": {"entrypoint": "no_such_module:build"}},
            "cannot import 'no_such_module': there is no such module in",
        ),
        ({"task": {"entrypoint": "bamboo_trainer.models.mlp:biuld"}}, "has no 'biuld'"),
        (
            {"task": {"entrypoint": "bamboo_trainer.models.mlp:build", "config": {"width": 0}}},
            "width must be at least 1",
        ),
        ({"topology": {"stages": 99}}, "spec.topology.stages: expected at most the model's 8 layers, got 99"),
    ],
)
def test_what_would_fail_at_the_start_is_told_before(spec: dict[str, Any], problem: str) -> None:
    assert problem in check(manifest(**spec))["problem"]


def test_layers_that_do_not_fit_together_and_losses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = small_task(layers=(lambda: nn.Linear(2, 4), lambda: nn.Linear(3, 2)))
    assert "layer 1 (Linear) raised RuntimeError" in of(wrong, monkeypatch)["problem"]
    lossless = small_task(loss=lambda outputs, targets: outputs[0])
    assert "the loss must be a scalar tensor" in of(lossless, monkeypatch)["problem"]


def test_layers_and_parameters_are_counted_and_tied_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (lambda: nn.Linear(2, 2), nn.ReLU, lambda: nn.Linear(2, 2))
    found = of(small_task(layers=layers, tied=(("0.weight", "2.weight"),)), monkeypatch)
    assert (found["layers"], found["parameters"]) == (3, 8)
    assert [stage[2] for stage in found["stages"]] == [6, 6]
    assert [stage[0] for stage in found["stages"]] == [0, found["stages"][0][1] + 1]


def test_a_layer_whose_way_depends_on_values_is_run_with_data(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task(layers=(lambda: nn.Linear(2, 2), Looks, lambda: nn.Linear(2, 2)))
    found = of(task, monkeypatch)
    assert (found["layers"], found["parameters"]) == (3, 12)


@functools.cache
def table() -> torch.Tensor:
    return torch.arange(2.0)


class Remembers(nn.Linear):
    """Keeps a table, which would have no data if it was first made where there are none."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + table()


def test_a_run_without_data_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    table.cache_clear()
    task = small_task(layers=(Remembers, Looks, lambda: nn.Linear(2, 2)))
    found = of(task, monkeypatch, topology={"stages": 2, "split": [1, 2]})
    assert "problem" not in found, found
    assert type(table()) is torch.Tensor


def test_memory_is_that_of_the_states_and_of_the_microbatches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of a layer each, AdamW: what is kept follows from sizes that can be added up by hand."""
    width, batch = 64, 16
    layers = (lambda: nn.Linear(2, width), lambda: nn.Sequential(nn.Tanh(), nn.Linear(width, 2)))
    task = small_task(layers=layers, optimizer=lambda named: torch.optim.AdamW([p for _, p in named]))
    training = {"steps": 3, "globalBatchSize": 8 * batch, "microBatchSize": batch}
    alone = {"training": training, "topology": {"stages": 2, "split": [1, 1]}, "redundancy": {"mode": "None"}}
    spec = parse_manifest(manifest(**alone))
    first, second = measure(task, spec)
    assert (first.held, first.gradients) == (4 * 3 * width, 4 * 3 * width)
    assert first.remembered == pytest.approx(2 * first.held, abs=16)  # and a step number for each parameter
    assert first.outputs == second.inputs == 4 * width * batch
    assert second.kept >= 4 * width * batch  # what tanh gave
    found = of(task, monkeypatch, **alone)["calm"]
    memory = found["memory"]
    assert (found["stage"], memory["replica"], memory["parameters"]) == (1, 0, second.held)
    assert memory["log"] == 2 * 8 * second.inputs  # the gradients that it sent, of two steps
    replicas = of(task, monkeypatch, **{**alone, "redundancy": {"mode": "LazyForward"}})
    assert replicas["calm"]["memory"]["replica"] > 0
    assert sum(replicas["taken_over"]["memory"].values()) > sum(replicas["calm"]["memory"].values())


def test_validate_loads_the_task_beside_the_manifest_or_says_that_it_did_not(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(manifest(task={"entrypoint": "beside_it:build"})))
    (tmp_path / "beside_it.py").write_text(
        "from bamboo_trainer.models.mlp import build as ours\n\n\ndef build(config):\n    print('noise')\n"
        "    return ours(config)\n"
    )
    unloaded = CliRunner().invoke(app, ["validate", str(job)])
    assert (unloaded.exit_code, "not checked: whether the task loads" in unloaded.stdout) == (0, True)
    loaded = CliRunner().invoke(app, ["validate", "--load", str(job)])
    assert loaded.exit_code == 0, loaded.output
    assert "task: 8 layers, 102.1 k parameters; layers of the stages: 0-" in loaded.stdout
    assert "memory: about " in loaded.stdout
    assert "noise" not in loaded.output
    (tmp_path / "beside_it.py").write_text("import os\n\nos._exit(3)\n")
    broken = CliRunner().invoke(app, ["validate", "--load", str(job)])
    assert (broken.exit_code, f"bamboo: {job}: the task could not be tried" in broken.stderr) == (2, True)


def test_submit_tries_the_task_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(SPIRALS))
    tried: list[tuple[Path, ...]] = []

    def trying(document: dict[str, Any], folders: tuple[Path, ...]) -> task_check.Checked:
        tried.append(folders)
        return task_check.Checked(problem="cannot import it")

    monkeypatch.setattr(task_check, "check_task", trying)
    submit = ["submit", str(job), "--kubeconfig", "/no/such"]
    refused = CliRunner().invoke(app, submit)
    assert (refused.exit_code, tried) == (2, [(tmp_path.resolve(), Path.cwd())])
    assert f"bamboo: {job}: cannot import it (--no-load submits the job without trying" in refused.stderr
    passed = CliRunner().invoke(app, [*submit, "--no-load"])
    assert ("/no/such" in passed.stderr, len(tried)) == (True, 1)
    assert "warning: one pipeline: the job ends" in passed.stderr, "which has nothing to do with the task"
    CliRunner().invoke(app, ["run", str(job), "--on", "cluster", "--kubeconfig", "/no/such"])
    assert len(tried) == 2


def test_without_the_trainer_it_is_said_that_nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "find_spec", lambda name: None if name == "torch" else object())
    assert check_task(SPIRALS, ()) == task_check.Checked(
        told=("not checked: the task, since torch is not installed here",)
    )


def test_what_a_fused_optimizer_remembers_is_counted_as_that_of_any_other() -> None:
    """Its kernels take no tensors without values."""

    def remembered(**settings: Any) -> list[int]:
        task = small_task(optimizer=lambda named: torch.optim.SGD([p for _, p in named], momentum=0.9, **settings))
        return [size.remembered for size in measure(task, parse_manifest(manifest()))]

    assert remembered(fused=True) == remembered() != [0, 0, 0]
