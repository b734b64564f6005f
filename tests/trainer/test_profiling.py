"""`bamboo profile`: measurements of a task's layers, and the command."""

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.profiles.files import read_profile
from bamboo_trainer.profiling import loopback, profile
from bamboo_trainer.stage.stage import build_stage
from profiling_kit import manifest


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Restore the number of torch's threads, which a measurement sets to 1."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_wrong_task_is_told_in_a_sentence() -> None:
    assert "wide" in profile(manifest(wide=3), 1)["problem"]
    told = profile(manifest("bamboo_trainer.models.nothing:build"), 1)["problem"]
    assert "bamboo_trainer.models.nothing" in told


def test_one_layer_is_in_memory_at_a_time_and_a_failed_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[Any]] = []

    def build(*given: Any) -> Any:
        assert not any(one() for one in built)
        built.append(weakref.ref(stage := build_stage(*given)))
        return stage

    monkeypatch.setattr("bamboo_trainer.profiling.build_stage", build)
    monkeypatch.setattr("bamboo_trainer.profiling.loopback", lambda: os.stat("/nowhere"))
    assert ("No such file" in profile(manifest(), 1, 0.0)["problem"], len(built)) == (True, 5)


def test_a_connection_within_this_machine_carries_something() -> None:
    assert 1e6 < loopback() < 1e13


def test_the_command_writes_a_profile_that_a_simulation_reads(tmp_path: Path) -> None:
    """`bamboo profile` measures a task from a module beside the manifest, in a process of the trainer."""
    job, written = tmp_path / "job.yaml", tmp_path / "profile.json"
    document = manifest("own_task:build")
    document["spec"]["task"]["config"] = {}
    job.write_text(yaml.safe_dump(document))
    (tmp_path / "own_task.py").write_text(
        "from bamboo_trainer.models import bert\n\ndef build(config):\n    return bert.build({'size': 'tiny'})\n"
    )
    runner = CliRunner()
    given = ["--repeats", "1", "--flow", "100", "--start", "20", "--output", str(written)]
    done = runner.invoke(app, ["profile", str(job), *given])
    assert done.exit_code == 0, done.output
    assert "5 layers on processor of" in done.output
    found = read_profile(str(written))
    assert (found.network.flow, found.times.start) == (1e8, 20.0)
    arguments = ["simulate", str(job), "--profile", str(written), "--preempt-rate", "0", "--seeds", "1"]
    simulated = runner.invoke(app, arguments)
    assert simulated.exit_code == 0, simulated.output


def test_a_gpu_that_is_not_here_is_computed_for_the_jobs_own_layers(tmp_path: Path) -> None:
    """`profile --device` and `simulate --profile @NAME` compute an absent GPU's profile. Flags override assumptions."""
    job, written = tmp_path / "job.yaml", tmp_path / "a100.json"
    job.write_text(yaml.safe_dump(manifest()))
    runner = CliRunner()
    given = ["--device", "A100", "--flow", "100", "--start", "20", "--output", str(written)]
    done = runner.invoke(app, ["profile", str(job), *given])
    assert done.exit_code == 0, done.output
    assert "5 layers on NVIDIA A100 80 GB" in done.output
    found = read_profile(str(written))
    assert (found.name, found.network.flow, found.times.start, found.times.detection) == ("tiny@a100", 1e8, 20.0, 5.0)
    assert found.estimated == ("layers.seconds", "layers.update", "storage")
    arguments = ["simulate", str(job), "--profile", "@a100", "--preempt-rate", "0", "--seeds", "1", "--price", "1"]
    simulated = runner.invoke(app, arguments)
    assert simulated.exit_code == 0, simulated.output
    assert "may be of another model" not in simulated.output


UNKNOWN_DEVICE = "no figures are known of the device 'b900'; known are v100"


@pytest.mark.parametrize(
    ("command", "flags", "told"),
    [
        ("profile", ["--flow", "0"], "--flow 0: expected a number above 0"),
        ("profile", ["--flow", "10", "--machine", "5"], "--machine: expected at least --flow"),
        ("profile", ["--device", "b900"], UNKNOWN_DEVICE),
        ("plan", ["--profile", "@b900", "--preempt-rate", "0"], UNKNOWN_DEVICE),
        ("plan", ["--device", "t4", "--profile", "@t4", "--preempt-rate", "0"], "--device: not with --profile"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_counted(
    tmp_path: Path, command: str, flags: list[str], told: str
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(manifest("nowhere:build")))
    done = CliRunner().invoke(app, [command, str(job), *flags])
    assert done.exit_code != 0
    assert told in done.output


def test_a_plan_over_gpus_of_which_none_is_here(tmp_path: Path) -> None:
    """`bamboo plan --device` compares absent GPUs by Bamboo's prices and computed times of the job's layers."""
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(manifest()))
    given = ["plan", str(job), "--device", "t4,l4", "--preempt-rate", "0.1", "--nodes", "3", "--output", "json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["recommended"]["plan"]["machine"] in ("g4dn.xlarge", "g6.xlarge")
    assert "layers.seconds" in found["estimated"]
