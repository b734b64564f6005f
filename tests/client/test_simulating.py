"""`bamboo simulate`: output, flags and budgets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import to_json
from job_simulation_kit import HOUR, job, nodes


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    one = job(3, None, elastic={"maxWorkers": 6})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(one.manifest))
    (tmp_path / "profile.json").write_bytes(to_json(one.profile))
    return str(tmp_path / "job.yaml"), str(tmp_path / "profile.json")


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
        (["JOB"], "--profile: expected a file that `bamboo profile "),
        (
            ["JOB", "--profile", "nothing.json", "--preempt-rate", "0.1"],
            "cannot read the profile nothing.json: ",
        ),
        (["JOB", "--profile", "PROFILE"], "--preempt-rate or --trace: expected one of them"),
        (
            ["JOB", "--profile", "PROFILE", "--preempt-rate", "0", "--zone-traffic-price", "-1"],
            "--zone-traffic-price -1: expected a number from 0 to 1000",
        ),
        (
            ["JOB", "--profile", "PROFILE", "--preempt-rate", "2"],
            "--preempt-rate 2: expected a number from 0 to 1",
        ),
        (
            ["JOB", "--profile", "PROFILE", "--preempt-rate", "0", "--hours", "0"],
            "--hours 0: expected a number above 0",
        ),
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


# budgets


def budgeted(money: str | None = None, steps: int = 10_000, **more: Any) -> JobRun:
    """Return a run of three workers at 2 USD an hour each, with steps of a quarter of a second."""
    budget = {} if money is None else {"budget": {"money": money}}
    one = job(3, nodePools=[{"name": "spot", "pricePerHour": "2"}], **budget, **more)
    document = {**one.manifest, "spec": {**one.manifest["spec"]}}
    document["spec"]["training"] = {**document["spec"]["training"], "steps": steps}
    return replace(one, manifest=document, spec=parse_manifest(document), trace=nodes(3, duration=24 * HOUR))


def test_a_run_ends_when_its_money_is_spent() -> None:
    free, told = simulate_job(budgeted("3")), list[str]()
    kept = {"storage": "memory://x"}
    for more in ({}, {"checkpoint": kept}):
        found = simulate_job(replace(budgeted("3", **more), heeds_money=True), told.append)
        assert (found.outcome, free.outcome) == ("Interrupted", "Complete")
        on = "goes on from its newest checkpoint" if more else "begins anew, since it keeps no checkpoints"
        assert found.message.startswith(f"the budget of 3 is spent; with a larger spec.budget.money the job {on}")
        assert 3.0 <= found.figures.usd < 3.1
        assert 0.4 * free.figures.steps < found.figures.steps < free.figures.steps
    assert any("Checkpoint" in line for line in told), "its state is kept"
    enough = simulate_job(replace(budgeted("30"), heeds_money=True))
    assert (enough.outcome, enough.figures.usd) == ("Complete", free.figures.usd)


def test_the_command_tells_that_the_money_was_spent(files: tuple[str, str], tmp_path: Path) -> None:
    document = budgeted("1").manifest
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    common = ("--preempt-rate", "0", "--jobs", "1", "--seeds", "2", "--quiet")
    done = invoke(str(tmp_path / "job.yaml"), "--profile", files[1], *common)
    assert done.exit_code == 0, done.output
    spent = str(done.output)
    assert "0: 2 of 2 ended: the budget of 1 is spent" in spent
    assert "0: of 10000 steps " in spent
