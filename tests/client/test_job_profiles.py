"""Profiles for a job: reading, and the check against the job's model."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.job_source import JobSource, source_of_file
from bamboo.jobs import job_profiles
from bamboo.jobs.job_profiles import read_profiles
from bamboo.local.trainer_calls.task_check import count_layers
from bamboo.local.trainer_calls.task_profile import task_of
from bamboo.local.trainer_calls.trainer_process import TrainerError
from bamboo.profiles.files import read_profile, shipped_names
from bamboo_core.planning.profile import ProfiledTask, ProfileError, to_json
from bamboo_trainer.check import count_layers as counted
from job_simulation_kit import profile
from task_check_kit import manifest

TASK = {"entrypoint": "mine:build", "config": {"width": 8, "list": [1, 2]}}


@pytest.fixture
def job(tmp_path: Path) -> JobSource:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest(task=TASK)))
    return source_of_file(str(path))


def warnings_of(job: JobSource, folder: Path, task: ProfiledTask | None) -> list[str]:
    """Write a profile of three layers with `task`, read it for the job, and return the warnings."""
    path = folder / "p.json"
    path.write_bytes(to_json(msgspec.structs.replace(profile(3), task=task)))
    profiles, warnings = read_profiles(job, [str(path)])
    assert list(profiles) == [str(path)]
    return [text.replace(str(path), "p") for text in warnings]


def has_layers(monkeypatch: pytest.MonkeyPatch, layers: int | None) -> None:
    """Fake the number of layers of the job's model. None: counting fails, as without torch."""

    def counted_layers(document: Any, folders: Any) -> int:
        if layers is None:
            raise TrainerError("no torch")
        return layers

    monkeypatch.setattr(job_profiles, "count_layers", counted_layers)


@pytest.mark.parametrize(
    ("fields", "loads", "told"),
    [
        ({}, False, ""),
        ({"entrypoint": "other:build"}, True, "its task.entrypoint is other:build, and the job's is mine:build"),
        ({"config": {"width": 9}}, True, 'its task.config is {"width": 9}, and the job\'s is {"list": [1, 2], "wid'),
        ({"precision": "bf16"}, False, "its training.precision is bf16, and the job's is fp32"),
        ({"boundary_precision": "bf16"}, False, "its training.boundaryPrecision is bf16, and the job's is fp32"),
    ],
)
def test_a_profile_that_may_be_of_another_model_is_warned_of(
    fields: dict[str, Any], loads: bool, told: str, job: JobSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's layers are counted only if the profile's task is unknown or differs in entrypoint or config."""
    task = msgspec.structs.replace(task_of(job.spec), **fields)
    has_layers(monkeypatch, 3 if loads else 4)
    warnings = warnings_of(job, tmp_path, task)
    assert len(warnings) == bool(told)
    for warning in warnings:
        assert warning.startswith(f"the profile p may be of another model: {told}")
        assert warning.endswith("All figures are those of its 3 layers")
    has_layers(monkeypatch, None)
    assert any("job's model is unknown here (no torch)" in one for one in warnings_of(job, tmp_path, task)) is loads


def test_a_profile_written_by_hand_is_believed_if_its_number_of_layers_fits(
    job: JobSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_layers(monkeypatch, 3)
    assert warnings_of(job, tmp_path, None) == []
    has_layers(monkeypatch, None)
    assert "it does not name its task (field task)" in warnings_of(job, tmp_path, None)[0]
    has_layers(monkeypatch, 26)
    with pytest.raises(ProfileError, match=r"has 3 layers \(field layers\), and the job's model 26 \(task.entrypoint"):
        warnings_of(job, tmp_path, None)


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_profile_has_the_layers_of_the_model_that_it_names(name: str) -> None:
    shipped = read_profile(name)
    assert shipped.task is not None
    task = {"entrypoint": shipped.task.entrypoint, "config": shipped.task.config}
    assert counted(manifest(task=task)) == {"layers": len(shipped.layers)}


def test_a_task_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("from bamboo_trainer.models.mlp import build\n")
    assert count_layers(manifest(task={"entrypoint": "beside_it:build"}), [tmp_path]) == 8
    with pytest.raises(TrainerError, match="cannot import 'nowhere'"):
        count_layers(manifest(task={"entrypoint": "nowhere:build"}), [tmp_path])


def test_commands_refuse_another_number_of_layers_and_warn_of_another_config(tmp_path: Path) -> None:
    path, how = str(tmp_path / "job.yaml"), ["--profile", "bert-v100", "--preempt-rate", "0.1", "--seeds", "1"]
    training = {"globalBatchSize": 16, "microBatchSize": 2, "steps": 9}

    def invoke(command: str, size: str) -> Any:
        task = {"entrypoint": "bamboo_trainer.models.bert:build", "config": {"size": size}}
        Path(path).write_text(yaml.safe_dump(manifest(task=task, training=training)))
        return CliRunner().invoke(app, [command, path, *how])

    for command in ("simulate", "plan"):
        refused = invoke(command, "base")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(
            f"bamboo: {path}: the profile bert-v100 has 26 layers (field layers; of bamboo_"
        )
        assert "and the job's model 14 (task.entrypoint bamboo_trainer.models.bert:build with" in refused.stderr
    warned = invoke("simulate", "large")
    assert warned.exit_code == 0, warned.output
    assert "warning: the profile bert-v100 may be of another model: its task.config is {" in warned.stderr
