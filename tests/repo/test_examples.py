"""The examples are valid; the model that docs/models.md explains trains with the same bits when a worker is killed."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import reference
from bamboo.cli.commands import app
from bamboo_core.job.manifest import parse_manifest
from bamboo_operator.manifests.worker_pod import template_problems
from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.training import TrainingConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BAMBOO = [sys.executable, "-m", "bamboo"]
STEPS = 8


def bamboo(*arguments: str, folder: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*BAMBOO, *arguments], capture_output=True, text=True, timeout=250, cwd=folder, env=environment
    )


def blocks(page: str) -> list[Any]:
    """Return the parts of specs that a page of docs/ shows in YAML blocks."""
    found = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    parsed = [yaml.safe_load(textwrap.dedent(block).replace("…", "0" * 64)) for block in found]
    return [document.get("spec", document) for document in parsed if document.keys() <= {"spec", "worker"}]


def shorter(example: str, folder: Path, **training: Any) -> str:
    document = yaml.safe_load((EXAMPLES / example).read_text())
    document["spec"]["training"] |= training
    job = folder / example
    job.write_text(yaml.safe_dump(document))
    return str(job)


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_is_valid(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    done = CliRunner().invoke(app, ["validate", example])
    assert done.exit_code == 0, done.output
    assert "is valid" in done.stdout


@pytest.mark.parametrize(("page", "least"), [("models.md", 1), ("install.md", 4)])
def test_what_the_pages_show_is_valid(page: str, least: int) -> None:
    shown = blocks(page)
    assert len(shown) >= least
    for part in shown:
        document = yaml.safe_load((EXAMPLES / "spirals.yaml").read_text())
        document["spec"] |= part
        if "elastic" in part and "topology" not in part:
            del document["spec"]["topology"]  # which fixes the whole grid
        assert template_problems(parse_manifest(document)) == [], part


def test_the_model_of_ones_own_trains_with_the_same_bits_when_a_worker_is_killed(tmp_path: Path) -> None:
    """The model's module is beside the manifest, and found before one in the current folder."""
    job = shorter("own-model.yaml", tmp_path, steps=STEPS, globalBatchSize=32, microBatchSize=8)
    shutil.copy(EXAMPLES / "own_model.py", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own_model.py").write_text("raise ValueError('the wrong one')\n")
    done = bamboo("run", job, "--preempt", "at:2:1", "--verify", "--json", folder=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert (summary["committed"], summary["preemptions"], summary["bit_equal"]) == (STEPS, 1, True)
    taken = summary["takeovers"][0]
    assert (taken["step"], taken["victim"]) == (2, "w1"), taken  # in mid-step; a spare worker may have ended it


def test_its_mistakes_are_told_in_a_sentence() -> None:
    with pytest.raises(TaskError, match=r"task\.config: unknown key 'widht'"):
        load_task("own_model:build", {"widht": 64})
    with pytest.raises(TaskError, match="width must be a multiple of 4"):
        load_task("own_model:build", {"width": 63})


def test_the_example_of_ones_own_model_learns() -> None:
    """The example trains in one process, in plain PyTorch, as the page advises."""
    task = load_task("own_model:build", {"width": 32, "blocks": 1, "length": 6, "dropout": 0.0})
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=1.0, microbatches=2, micro_batch_size=32)
    losses, _ = reference.train(task, config, 40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
