"""The Dockerfile, the CI workflows and the targets of the Makefile, checked without building images."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def load(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.safe_load(path.read_text())
    return document


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {"contents": "read"}
    for name, job in document["jobs"].items():
        assert job["timeout-minutes"] <= 360, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@([0-9a-f]{40}|(release/)?v\d+)", step.get("uses", "a/b@v1")), step
            # what others may choose reaches a shell through the environment only
            assert "${{" not in step.get("run", ""), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflows_commands_are_bash_and_its_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in load(path)["jobs"].values():
        for command in filter(None, (step.get("run") for step in job["steps"])):
            checked = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, timeout=60)
            assert checked.returncode == 0, checked.stderr
            assert set(re.findall(r"\bmake ([a-z]+)", command)) <= targets


def test_what_a_change_does_not_run_runs_every_night() -> None:
    """`make test` and the nightly `make slow` run all tests, those of the images too, except soak tests."""
    chosen = re.findall(r'pytest -q -m "(.+?)"', (ROOT / "Makefile").read_text())
    assert chosen == ["not slow and not soak", "slow and not soak"]
    (job,) = load(ROOT / ".github/workflows/slow.yaml")["jobs"].values()
    assert job["steps"][-1]["run"] == "make slow"


def test_the_images_versions_are_the_distributions() -> None:
    versions = {
        tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]["version"]
        for part in ("core", "client", "operator", "trainer")
    }
    labels = re.findall(r'image\.version="(.+)"', (ROOT / "Dockerfile").read_text())
    assert len(labels) == 2
    assert set(labels) == versions


def test_the_context_has_what_the_dockerfile_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    copied = re.findall(r"^COPY (?!--from)(\S+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(entry == path or entry.startswith(f"{path}/") for entry in sent), path


def test_the_demo_installs_what_it_needs_and_torch_from_where_the_user_says(tmp_path: Path) -> None:
    """Options for torch apply to torch alone, since an index of CPU builds has no other packages."""
    arguments = ["make", "-n", "demo", f"VENV={tmp_path}/venv", "TORCH_ARGS=--index-url https://cpu.test"]
    printed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    installs = [line for line in printed.splitlines() if " install " in line]
    assert ["cpu.test" in line for line in installs] == [True, False]
    assert "--no-deps torch==" in installs[0]
    assert "-e core -e client -e trainer -c constraints.txt" in installs[1]
    assert "-e operator" not in printed
