"""A new field of a manifest or a status is added in one place: its type. All else of the API is made from that."""

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
STATUS_TYPE = "core/bamboo_core/job/status.py"
STATUS_BEFORE = '    """By the median duration of recent steps."""\n'
STATUS_FIELD = '''\
    lost_samples: Count | None = None
    """Samples of committed steps that did not go into them."""
'''
STATUS_SOURCE = "core/bamboo_core/view/run_status.py"
SOURCE_BEFORE = "        loss=_rounded(live.loss, 6),\n"
SOURCE = "        lost_samples=live.lost_samples,\n"
STATUS_PROBE = """\
import json, sys
sys.path.append(sys.argv[1])
from bamboo_core.job.api_object import written
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.view.job_view import view_of
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import StatusFacts
from operator_kit import NOW, job, said

facts = StatusFacts(now=NOW, generation=1, spec=job())
first = job_status(said(lost_samples=4), BambooJobStatus(), facts)
later = job_status(None, first, facts)
shown = view_of({"status": written(later)})
print(json.dumps([written(later)["training"]["lostSamples"], shown.status.training.lost_samples]))
"""
MADE = ["crds/bamboojob.yaml", "docs/api.md"]
GENERATORS = ["crds/generate.py", "docs/generate_api.py"]
COPIED = [
    "core/bamboo_core",
    "crds",
    "docs/generate_api.py",
    "docs/api.md",
]
MOST_FILES = 5
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


def copy_with(factory: pytest.TempPathFactory, *fields: tuple[str, str, str]) -> Path:
    """A copy of what the API is made from, and of what is made of it. fields: file, what comes after, and new lines."""
    copy = factory.mktemp("repository")
    for name in COPIED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    for name, before, lines in fields:
        text = (copy / name).read_text()
        assert text.count(before) == 1
        (copy / name).write_text(text.replace(before, lines + before))
    for generator in GENERATORS:
        run(copy, generator)
    return copy


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which a manifest has one field more."""
    return copy_with(tmp_path_factory, (TYPE, BEFORE, FIELD))


@pytest.fixture(scope="module")
def status_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which a status has one field more."""
    fields = (STATUS_TYPE, STATUS_BEFORE, STATUS_FIELD), (STATUS_SOURCE, SOURCE_BEFORE, SOURCE)
    return copy_with(tmp_path_factory, *fields)


def changed(root: Path) -> set[str]:
    files = (file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {
        str(file.relative_to(root))
        for file in files
        if file.read_bytes() != (ROOT / file.relative_to(root)).read_bytes()
    }


def with_training(**values: Any) -> dict[str, Any]:
    document = minimal()
    document["spec"]["training"] |= values
    return document


def test_a_new_scalar_field_touches_six_files_at_most(root: Path) -> None:
    """Its type and what `make docs` makes of it; what decides by it comes on top, with its test."""
    found = changed(root)
    assert found == {TYPE, *MADE}
    assert len(found) + len(["what decides by it"]) <= MOST_FILES


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
    version = yaml.safe_load((root / MADE[0]).read_text())["spec"]["versions"][0]
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


def test_a_new_scalar_field_of_a_status_touches_six_files_at_most(status_root: Path) -> None:
    """Its type, where it is known, and what `make docs` makes of it; the test of it comes on top."""
    found = changed(status_root)
    assert found == {STATUS_TYPE, STATUS_SOURCE, *MADE}
    assert len(found) + len(["its test"]) <= MOST_FILES


def test_the_new_field_of_a_status_is_written_kept_read_and_documented(status_root: Path) -> None:
    found = run(status_root, "-c", STATUS_PROBE, str(ROOT / "tests" / "support"))
    assert json.loads(found) == [4, 4]
    version = yaml.safe_load((status_root / MADE[0]).read_text())["spec"]["versions"][0]
    training = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["training"]
    described = "Samples of committed steps that did not go into them."
    bounds = {"type": "integer", "format": "int32", "minimum": 0, "maximum": 2**31 - 1}
    assert training["properties"]["lostSamples"] == {**bounds, "description": described}
    assert "`lostSamples`" in (status_root / "docs" / "api.md").read_text()
