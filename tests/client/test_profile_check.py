"""How many layers a job's model has, and profiles of other models."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.local.trainer_calls.task_check import count_layers
from bamboo.profiles.files import read_profile, shipped_names
from bamboo_trainer.check import count_layers as counted
from task_check_kit import manifest


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_profile_has_the_layers_of_the_model_that_it_names(name: str) -> None:
    profile = read_profile(name)
    assert profile.task is not None
    task = {"entrypoint": profile.task.entrypoint, "config": profile.task.config}
    assert counted(manifest(task=task)) == {"layers": len(profile.layers)}


def test_a_task_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("from bamboo_trainer.models.mlp import build\n")
    assert count_layers(manifest(task={"entrypoint": "beside_it:build"}), [tmp_path]) == 8
    told = count_layers(manifest(task={"entrypoint": "nowhere:build"}), [tmp_path])
    assert isinstance(told, str)
    assert "cannot import 'nowhere'" in told


def test_a_profile_of_another_model_gives_no_figure_silently(tmp_path: Path) -> None:
    bert: dict[str, Any] = {"entrypoint": "bamboo_trainer.models.bert:build"}
    paths = []
    for number, config in enumerate(({"size": "base"}, {"size": "large"}, {"size": "large", "data": {"length": 512}})):
        document = manifest(
            task={**bert, "config": config}, training={"globalBatchSize": 16, "microBatchSize": 2, "steps": 9}
        )
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(yaml.safe_dump(document))
    how = ["--profile", "bert-v100", "--preempt-rate", "0.1"]
    refused = CliRunner().invoke(app, ["simulate", str(paths[0]), *how, "--seeds", "1"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    told = f"bamboo: {paths[0]}: the profile bert-v100 has 26 layers (field layers; of bamboo_trainer.models.bert:build"
    assert refused.stderr.startswith(told)
    assert "and the job's model 14 (task.entrypoint bamboo_trainer.models.bert:build with" in refused.stderr
    planned = CliRunner().invoke(app, ["plan", str(paths[0]), *how])
    assert (planned.exit_code, planned.stderr) == (2, refused.stderr)
    warned = CliRunner().invoke(app, ["simulate", str(paths[1]), *how, "--seeds", "1"])
    assert warned.exit_code == 0, warned.output
    assert "warning: the profile bert-v100 may be of another model: it is of the config" in warned.stderr
    fits = CliRunner().invoke(app, ["simulate", str(paths[2]), *how, "--seeds", "1", "--quiet"])
    assert fits.exit_code == 0, fits.output
    assert "another model" not in fits.stderr
