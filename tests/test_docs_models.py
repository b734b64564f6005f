"""What docs/models.md says of a worker's pod and of the trained weights is what the code does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml

from bamboo.names import (
    ENV_METADATA,
    ENV_METADATA_ACKNOWLEDGE,
    ENV_METADATA_REBALANCE,
    ENV_METADATA_URL,
    ENV_METRICS_PORT,
    METRICS_PORT,
    TOKEN_FOLDER,
    TRAINER_CONTAINER,
)
from bamboo_operator.template import OWN_ENV, TOKEN_VOLUME
from bamboo_trainer.__main__ import HELP
from bamboo_trainer.loading import load_task
from bamboo_trainer.metadata import DEFAULT_URL
from bamboo_trainer.placement import DEVICE_VARIABLE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "models.md").read_text()
SETTABLE = {
    DEVICE_VARIABLE: "a GPU",
    ENV_METADATA: "`off`",
    ENV_METADATA_URL: f"`{DEFAULT_URL}`",
    ENV_METADATA_REBALANCE: "`false`",
    ENV_METADATA_ACKNOWLEDGE: "`false`",
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


def test_the_code_that_the_page_shows_loads_the_trained_weights(tmp_path: Path, monkeypatch: Any) -> None:
    config = {"width": 8, "blocks": 3}
    job = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "loads"},
        "spec": {
            "task": {"entrypoint": "bamboo_trainer.models.mlp:build", "config": config},
            "training": {"steps": 2, "globalBatchSize": 8, "microBatchSize": 4},
            "topology": {"stages": 2},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "bamboo", "run", "job.yaml", "--output", ".", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr

    (code,) = re.findall(r"```python\n(.*?)```", section("The trained weights"), re.DOTALL)
    task = load_task("bamboo_trainer.models.mlp:build", config)
    names: dict[str, Any] = {
        "Path": Path,
        "safetensors": safetensors,
        "build": lambda given: task if given == config else None,
        "config": config,
    }
    monkeypatch.chdir(tmp_path)
    exec(code, names)  # noqa: S102 - it is the page's
    saved = names["tensors"]
    assert len(saved) == sum(len(layer.state_dict()) for layer in names["layers"]) > 0
    for number, layer in enumerate(names["layers"]):
        assert not layer.training
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, saved[f"layers.{number}.{name}"])
