"""`bamboo simulate JOB.yaml`: its output and its flags."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_run import JobRun, simulate_job
from job_simulation_kit import job, nodes

pytest_plugins = ["job_simulation_fixtures"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_the_command_prints_a_table_json_and_csv(files: tuple[str, str], tmp_path: Path) -> None:
    common = [files[0], "--profile", files[1], "--hours", "1", "--seeds", "2", "--jobs", "1", "--preempt-rate", "0.5"]
    table = invoke(*common)
    assert table.exit_code == 0, table.output
    assert table.output.split()[:4] == ["CASE", "RUNS", "PREEMPTIONS", "TAKEOVERS"]
    document = json.loads(invoke(*common, "--output", "json").stdout)
    assert document[0]["runs"] == 2
    assert 0 < document[0]["mean"]["goodput"] <= 1
    assert document[0]["mean"]["usd"] is None  # no price is known
    assert len(document[0]["overTime"]["hours"]) == len(document[0]["overTime"]["throughput"]) == 200
    assert invoke(*common, "--output", "csv", "--price", "1").stdout.startswith("case,runs,fatal_share,preemptions,")


def test_hours_beyond_a_recording_end_with_it(files: tuple[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(6)) + "3600000,remove,n4\n")
    said = (files[0], "--profile", files[1], "--trace", str(trace), "--output", "json", "--quiet")
    whole, beyond = (invoke(*said, *hours) for hours in ((), ("--hours", "5")))
    assert whole.exit_code == beyond.exit_code == 0, beyond.output
    assert whole.stdout == beyond.stdout


def test_the_command_draws_and_tells_what_happens(files: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "t.csv", tmp_path / "runs.png"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(6)) + "600000,remove,n3\n3600000,remove,n4\n")
    done = invoke(files[0], "--profile", files[1], "--trace", str(trace), "--plot", str(picture), "--events")
    assert done.exit_code == 0, done.output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "Takeover: lost sim-w" in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected JOB.yaml, or --model research"),
        (["JOB"], "--profile: expected a file that `bamboo profile "),
        (
            ["JOB", "--profile", "nothing.json", "--preempt-rate", "0.1"],
            "cannot read the profile nothing.json: ",
        ),
        (["JOB", "--profile", "PROFILE"], "--preempt-rate or --trace: expected one of them"),
        (
            ["JOB", "--profile", "PROFILE", "--preempt-rate", "2"],
            "--preempt-rate 2: expected a probability",
        ),
        (["JOB", "--workload", "bert"], "--workload: cannot be combined with --model job"),
        (["--model", "research", "--profile", "x"], "--profile: cannot be combined with --model research"),
        (["JOB", "--model", "research", "--preempt-rate", "0"], "--model research: expected no job"),
        (["JOB", "--profile", "PROFILE", "--preempt-rate", "0", "--hours", "0"], "--hours must be more than 0"),
    ],
)
def test_wrong_flags_get_one_sentence(files: tuple[str, str], arguments: list[str], told: str) -> None:
    names = {"JOB": files[0], "PROFILE": files[1]}
    done = invoke(*(names.get(one, one) for one in arguments))
    assert done.exit_code == 2
    assert told in done.output


def test_more_stages_than_layers_are_named() -> None:
    one = job(3)
    few = msgspec.structs.replace(one.profile, layers=one.profile.layers[:2])
    with pytest.raises(SimulationError, match=r"expected at most the model's 2 layers, got 3 \(of the profile tiny\)"):
        simulate_job(JobRun(spec=one.spec, manifest=one.manifest, profile=few, trace=nodes(3)))
