"""The distributions that a release publishes: the wheels work in a fresh environment, and a tag names their version."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from folders import ROOT

FIVE_LINES = """\
import bamboo
job = bamboo.Job("first", task="bamboo_trainer.models.mlp:build", topology={"stages": 2},
                 training={"steps": 5, "globalBatchSize": 8, "microBatchSize": 4})
if __name__ == "__main__":
    with job.run(page=False) as handle: print(handle.wait(300).state, len(handle.weights()))
"""
PACKAGES = ("bamboo", "bamboo_core", "bamboo_trainer", "bamboo_operator")


def call(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build the wheels from the source distributions, and return their paths."""
    folder = tmp_path_factory.mktemp("dist")
    for name in ("core", "client", "trainer", "operator"):
        call(sys.executable, "-m", "build", "--no-isolation", "-q", "-o", folder, ROOT / name, cwd=folder)
    assert len(list(folder.glob("*.tar.gz"))) == len(PACKAGES)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheels into a fresh environment with this one's dependencies, and return its folder of programs."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    programs = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    call(*pip, "install", "--no-deps", "--no-index", "-q", *wheels, cwd=folder)
    own = Path(call(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    (Path(str(own).strip()) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


@pytest.mark.slow
def test_every_wheel_has_its_license_and_types(wheels: list[Path]) -> None:
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith("licenses/LICENSE") for name in names), wheel
        assert any(name.endswith("/py.typed") for name in names), wheel


@pytest.mark.slow
def test_the_installed_command_and_the_five_lines_work(installed: Path, tmp_path: Path) -> None:
    asked = f"import {', '.join(PACKAGES)}; print(all('fresh' in one.__file__ for one in ({', '.join(PACKAGES)})))"
    assert call(installed / "python", "-c", asked, cwd=tmp_path) == "True\n", "not those of this checkout"
    assert call(installed / "bamboo", "--version", cwd=tmp_path) == "0.1.0\n"
    assert "bamboo-operator" in call(installed / "bamboo-operator", "--help", cwd=tmp_path)
    (tmp_path / "first.py").write_text(FIVE_LINES)
    assert call(installed / "python", "first.py", cwd=tmp_path) == "Complete 40\n"


def test_a_tag_of_another_version_is_refused() -> None:
    check = ROOT / ".github" / "release_version.py"
    assert subprocess.run([sys.executable, check, "v0.1.0"], capture_output=True, timeout=60).returncode == 0
    wrong = subprocess.run([sys.executable, check, "v9.9.9"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1
    assert "core/pyproject.toml is 0.1.0, and the tag is v9.9.9" in wrong.stderr
    assert "charts/bamboo/Chart.yaml, version is" in wrong.stderr
