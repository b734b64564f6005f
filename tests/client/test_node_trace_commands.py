"""The commands on traces of nodes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app


def test_a_generated_trace_is_converted_and_shown_without_loss(tmp_path: Path) -> None:
    run, made, again = CliRunner().invoke, str(tmp_path / "made.jsonl"), str(tmp_path / "again.jsonl")
    done = run(app, ["traces", "generate", "zones", "--zones", "a,b", "--price", "0.9", "--seed", "4", "-o", made])
    assert (done.exit_code, done.output) == (0, "")
    assert run(app, ["traces", "convert", made, "-o", again]).exit_code == 0
    assert Path(again).read_text() == Path(made).read_text()
    shown = json.loads(run(app, ["traces", "show", made, "--output", "json"]).stdout)
    assert (shown["zones"], len(shown["removals_by_hour"])) == (["a", "b"], 24)
    assert shown["usd_per_hour"] == pytest.approx(0.9)
    text = run(app, ["traces", "show", made]).stdout
    assert "generated: zones, seed 4" in text
    assert "0.9000 USD per node hour" in text
    wrong = run(app, ["traces", "show", str(tmp_path)])
    assert (wrong.exit_code, wrong.stderr) == (2, f"bamboo: cannot read {tmp_path}: Is a directory\n")
    assert run(app, ["traces", "generate", "hourly", "--nodes", "0"]).exit_code == 2
    unwritten = run(app, ["traces", "convert", made, "-o", str(tmp_path)])
    assert (unwritten.exit_code, unwritten.stderr) == (1, f"bamboo: cannot write {tmp_path}: Is a directory\n")
