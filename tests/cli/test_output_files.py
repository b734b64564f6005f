"""Refusals of "-" (standard output) for outputs that must be a folder or a file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from manifest_kit import MINIMAL

JOB = "job.yaml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "flag", "expected"),
    [
        (["simulate", JOB, "--preempt-rate", "0.1", "--profile", "bert-v100", "--plot", "-"], "--plot", "a file"),
        (["run", JOB, "--trace", "-"], "--trace", "a file"),
        (["run", JOB, "--output", "-"], "--output", "a folder"),
        (["tokenize", JOB, "--output", "-"], "--output", "a file"),
        (["tokenize", JOB, "--output", "-", "--shard", "9"], "--output", "a folder"),
        (["export", "folder", "--output", "-"], "--output", "a file"),
        (["export", "folder", "--output", "-", "--format", "huggingface"], "--output", "a folder"),
    ],
)
def test_what_is_no_text_is_never_written_to_a_file_called_dash(words: list[str], flag: str, expected: str) -> None:
    Path(JOB).write_text(MINIMAL)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (2, f"bamboo: {flag} -: expected {expected}, not standard output\n")
    assert [path.name for path in Path().iterdir()] == [JOB]
