"""Statements of docs/models.md and docs/tutorial.md on models, pods and weights are true; python-api.md is current."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import whole_workers
from bamboo_core.names import (
    ENV_DEVICE,
    ENV_METRICS_PORT,
    METRICS_PORT,
    TOKEN_FOLDER,
    TRAINER_CONTAINER,
)
from bamboo_operator.manifests.template import OWN_ENV, TOKEN_VOLUME
from bamboo_trainer.__main__ import HELP
from bamboo_trainer.loading import load_task
from bamboo_trainer.training import TrainingConfig
from reference import train
from tutorial_kit import TUTORIAL, shown

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
SETTABLE = {
    ENV_DEVICE: "a GPU",
    ENV_METRICS_PORT: f"`{METRICS_PORT}`",
}


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_variables_that_a_job_may_set_are_listed_with_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", section("The pod"), re.MULTILINE))
    assert rows.keys() == SETTABLE.keys()
    for name, default in SETTABLE.items():
        assert default in rows[name]
        assert name in HELP
    others = set(re.findall(r"^  ([A-Z_]+) ", HELP, re.MULTILINE)) - SETTABLE.keys()
    assert others - set(OWN_ENV) == {"BAMBOO_ZONE"}  # which the operator knows from the node


def test_what_is_the_operators_own_is_named() -> None:
    text = section("The pod")
    for name in (*OWN_ENV, TOKEN_VOLUME, TOKEN_FOLDER, TRAINER_CONTAINER, "restartPolicy"):
        assert f"`{name}`" in text


def test_the_first_model_of_the_tutorial_trains_and_its_weights_are_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    """The tutorial's command trains its first model, with fewer steps; the code in models.md then loads the weights."""
    (tmp_path / "first_model.py").write_text(shown("python", "first_model.py"))
    job = yaml.safe_load(shown("yaml", "first-model.yaml"))
    config = job["spec"]["task"]["config"]
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task("first_model:build", config)
    settings = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=4, micro_batch_size=16)
    losses, _ = train(task, settings, job["spec"]["training"]["steps"])
    assert losses[-1] < 0.5 * losses[0], "the first model does not learn"

    job["spec"]["training"]["steps"] = 4
    (tmp_path / "first-model.yaml").write_text(yaml.safe_dump(job))
    assert "bamboo run first-model.yaml --output trained\n" in TUTORIAL
    command = [sys.executable, "-m", "bamboo", "run", "first-model.yaml", "--output", "trained"]
    done = subprocess.run([*command, "--preempt", "at:2:1"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    kept = {path.name for path in (tmp_path / "trained").iterdir()}
    assert kept == {"weights", "workers.log", "page.html", "history", "history.jsonl"}

    (code,) = re.findall(r"```python\n(.*?)```", section("The trained weights"), re.DOTALL)
    names: dict[str, Any] = {
        "Path": Path,
        "safetensors": safetensors,
        "build": lambda given: task if given == config else None,
        "config": config,
    }
    monkeypatch.chdir(tmp_path / "trained")
    exec(code, names)  # noqa: S102 - it is the page's
    saved = names["tensors"]
    assert len(saved) == sum(len(layer.state_dict()) for layer in names["layers"]) > 0
    for number, layer in enumerate(names["layers"]):
        assert not layer.training
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, saved[f"layers.{number}.{name}"])


def test_the_first_spot_job_of_the_tutorial_is_one_that_the_operator_takes() -> None:
    job = yaml.safe_load(shown("yaml", "first-spot-job.yaml"))
    spec = parse_manifest(job)
    assert (spec.topology.stages, whole_workers(spec), len(spec.node_pools)) == (3, 6, 2)
    images = (ROOT / "docs" / "images.md").read_text()
    assert re.findall(r"```dockerfile\n.*?```", TUTORIAL, re.DOTALL)[0] in images
