"""A new field of a manifest is added in one place: its type. All else of the API is made from that."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.manifest import parse_manifest
from folders import ROOT
from manifest_kit import minimal

TYPE = "core/bamboo_core/job/training_spec.py"
BEFORE = "    precision: Precision = "
FIELD = '''\
    warmup_steps: Annotated[int, Integer(0)] = 0
    """Steps in which the learning rate grows. None by default."""
'''
MADE = ["crds/bamboojob.yaml", "charts/bamboo/files/bamboojob.yaml", "docs/api.md"]
GENERATORS = ["crds/generate.py", "docs/generate_api.py", "charts/generate.py"]
COPIED = [
    "core/bamboo_core",
    "crds",
    "charts",
    "docs/generate_api.py",
    "docs/api.md",
    "docs/chart.md",
    "operator/rbac.yaml",
]
MOST_FILES = 6
PROBE = """\
import json, sys
from bamboo_core.job.edits import numbers_digest, refused_fields
from bamboo_core.job.manifest import ManifestError, parse_manifest

def problems(document):
    try:
        parse_manifest(document)
    except ManifestError as error:
        return [str(problem) for problem in error.problems]

usual, said, wrong, misspelt = json.load(sys.stdin)
one, other = parse_manifest(usual), parse_manifest(said)
print(json.dumps({
    "values": [one.training.warmup_steps, other.training.warmup_steps],
    "digests": [numbers_digest(one), numbers_digest(other)],
    "refused": refused_fields(one, other),
    "problems": problems(wrong) + problems(misspelt),
}))
"""


def run(root: Path, *arguments: str, text: str = "") -> str:
    """With the core that is in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(root / "core")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the API is made from, and of what is made of it, with one field more."""
    copy = tmp_path_factory.mktemp("repository")
    for name in [*COPIED, "dashboards"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    text = (copy / TYPE).read_text()
    assert text.count(BEFORE) == 1
    (copy / TYPE).write_text(text.replace(BEFORE, FIELD + BEFORE))
    for generator in GENERATORS:
        run(copy, generator)
    return copy


def with_training(**values: Any) -> dict[str, Any]:
    document = minimal()
    document["spec"]["training"] |= values
    return document


def test_a_new_scalar_field_touches_six_files_at_most(root: Path) -> None:
    """Its type and what `make docs` makes of it; what decides by it and the test of that come on top."""
    changed = {
        str(file.relative_to(root))
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
        if file.read_bytes() != (ROOT / file.relative_to(root)).read_bytes()
    }
    assert changed == {TYPE, *MADE}
    assert len(changed) + len(["the decision", "its test"]) <= MOST_FILES


def test_the_new_field_is_read_checked_fixed_and_documented(root: Path) -> None:
    documents = [with_training(), with_training(warmupSteps=7), with_training(warmupSteps=-1)]
    documents.append(with_training(warmupStep=7))
    found = json.loads(run(root, "-c", PROBE, text=json.dumps(documents)))
    assert found["values"] == [0, 7]
    assert found["refused"] == ["spec.training.warmupSteps"]
    assert found["problems"] == [
        "spec.training.warmupSteps: expected an integer >= 0, got -1",
        "spec.training.warmupStep: unknown field, did you mean warmupSteps?",
    ]
    (version,) = yaml.safe_load((root / MADE[0]).read_text())["spec"]["versions"]
    training = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["training"]
    described = "Steps in which the learning rate grows. None by default."
    bounds = {"type": "integer", "format": "int32", "minimum": 0, "maximum": 2**31 - 1}
    assert training["properties"]["warmupSteps"] == {**bounds, "default": 0, "description": described}
    assert f"| `warmupSteps` | integer, at least 0 | `0` | {described} |" in (root / "docs" / "api.md").read_text()


def test_a_checkpoint_from_before_the_new_field_fits_a_job_that_does_not_use_it(root: Path) -> None:
    documents = [with_training(), with_training(warmupSteps=7), with_training(warmupSteps=-1), with_training(x=1)]
    found = json.loads(run(root, "-c", PROBE, text=json.dumps(documents)))
    before = numbers_digest(parse_manifest(with_training()))
    assert found["digests"][0] == before != found["digests"][1]
