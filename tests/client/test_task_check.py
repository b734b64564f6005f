"""`--load`: the check of a task before its job runs, and the memory that its workers need."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.local.trainer_calls.trainer_process import TrainerError
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.memory.estimate import measure
from stage_kit import small_task
from task_check_kit import SPIRALS, manifest


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
    job.write_text(yaml.safe_dump(manifest(task={"entrypoint": "beside_it:build"}, worker={"devices": 2})))
    several = CliRunner().invoke(app, ["validate", "--load", str(job)])
    assert "workers of 2 devices and" in several.stdout
    assert " for a device of the worker of stage " in several.stdout
    (tmp_path / "beside_it.py").write_text("import os\n\nos._exit(3)\n")
    broken = CliRunner().invoke(app, ["validate", "--load", str(job)])
    assert (broken.exit_code, f"bamboo: {job}: the task could not be tried" in broken.stderr) == (2, True)
    assert "is valid" not in broken.output, "one verdict"


def test_submit_tries_the_task_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(SPIRALS))
    tried: list[tuple[Path, ...]] = []

    def trying(document: dict[str, Any], folders: tuple[Path, ...]) -> tuple[str, ...]:
        tried.append(folders)
        raise TrainerError("cannot import it")

    monkeypatch.setattr("bamboo.jobs.here.check_task", trying)
    submit = ["submit", str(job), "--kubeconfig", "/no/such"]
    refused = CliRunner().invoke(app, submit)
    assert (refused.exit_code, tried) == (2, [(tmp_path.resolve(), Path.cwd())])
    assert f"bamboo: {job}: cannot import it (--no-load submits the job without trying" in refused.stderr
    passed = CliRunner().invoke(app, [*submit, "--no-load"])
    assert ("/no/such" in passed.stderr, len(tried)) == (True, 1)
    assert "warning: one pipeline: the job ends" in passed.stderr, "which has nothing to do with the task"


def test_what_a_fused_optimizer_remembers_is_counted_as_that_of_any_other() -> None:
    """A fused optimizer's state is as large as a plain one's, although fused kernels refuse meta tensors."""

    def remembered(**settings: Any) -> list[int]:
        task = small_task(optimizer=lambda named: torch.optim.SGD([p for _, p in named], momentum=0.9, **settings))
        return [size.bytes.optimizer for size in measure(task, parse_manifest(manifest()))]

    assert remembered(fused=True) == remembered() != [0, 0, 0]
