"""`bamboo traces FILE`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from node_trace_kit import OWN


def test_a_recording_is_shown_as_text_and_as_json(tmp_path: Path) -> None:
    file = tmp_path / "nodes.jsonl"
    file.write_text(OWN)
    shown = json.loads(CliRunner().invoke(app, ["traces", str(file), "--output", "json"]).stdout)
    assert (shown["zones"], shown["removals_by_hour"]) == (["east-a", "east-b"], [0, 1])
    assert shown["usd_per_hour"] == pytest.approx((2 * 1.0 + 1 * 2.0) / 3)
    text = CliRunner().invoke(app, ["traces", str(file)]).stdout
    assert "made for a test" in text
    assert "1.3333 USD per node hour" in text
    wrong = CliRunner().invoke(app, ["traces", str(tmp_path)])
    assert (wrong.exit_code, wrong.stderr) == (2, f"bamboo: cannot read {tmp_path}: Is a directory\n")
