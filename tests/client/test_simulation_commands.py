"""`bamboo plan`: output and refusals."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import to_json
from job_simulation_kit import manifest
from node_trace_kit import recording
from sizing_kit import PRICES, layered


@pytest.fixture
def files(tmp_path: Path) -> Path:
    document = manifest(2, 1, 6)
    document["spec"]["training"]["steps"] = 2000
    text = "# my job\n" + yaml.safe_dump(document)
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "profile.json").write_bytes(to_json(layered(3)))
    machines = {"small": {"spot": 1.0, "onDemand": 3.0, "profile": "profile.json"}}
    (tmp_path / "prices.yaml").write_text(yaml.safe_dump({**PRICES, "machines": machines}))
    return tmp_path


def invoke(folder: Path, *arguments: str) -> Any:
    words = ["plan", str(folder / "job.yaml"), "--prices", str(folder / "prices.yaml"), "--jobs", "1", *arguments]
    return CliRunner().invoke(app, words)


QUICK = ("--preempt-rate", "0.5", "--nodes", "4", "--seeds", "2", "--micro-batch", "4", "--hours", "0.5")


def test_the_command_recommends_and_says_what_to_change(files: Path) -> None:
    done = invoke(files, *QUICK)
    assert done.exit_code == 0, done.output
    assert "Recommended " in done.output
    assert "on demand, " in done.output
    assert "95 % confidence" in done.output or "no node was lost" in done.output or "all copies" in done.output
    assert "To change in the manifest:\n" in done.output


def test_the_command_prints_json(files: Path) -> None:
    done = invoke(files, *QUICK, "--output", "json", "--deadline", "2h")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["recommended"]["hoursOf95"] <= 2
    assert found["recommended"]["usd"] == min(one["usd"] for one in found["front"] if one["hoursOf95"] <= 2)
    parse_manifest(found["recommended"]["manifest"])


def test_bounds_that_nothing_keeps_are_a_failure(files: Path) -> None:
    done = invoke(files, *QUICK, "--budget", "0.000001")
    assert done.exit_code == 1
    assert "no plan keeps the bounds by 2 runs (mean and 1.645 deviations): the fastest takes up to " in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--preempt-rate or --trace: expected one of them"),
        (["--preempt-rate", "2"], "--preempt-rate 2: expected a number from 0 to 1"),
        (["--preempt-rate", "0.1", "--trace", "x"], "--preempt-rate: cannot be combined with --trace"),
        (["--trace", "x", "--zones", "a"], "--zones: cannot be combined with --trace"),
        (["--trace", "x", "--replace-rate", "0.5"], "--replace-rate: cannot be combined with --trace"),
        (["--preempt-rate", "0.1", "--stages", "a"], "--stages 'a': expected at most 64 whole numbers from 1 on"),
        (["--preempt-rate", "0.1", "--budget", "0"], "--budget 0: expected a number above 0"),
        (["--preempt-rate", "0.1", "--stages", "9"], "no grid can be used; allow more --nodes"),
        (["--preempt-rate", "0.1", "--pattern", "x"], "--pattern must be one of hourly, zones, not 'x'"),
        (["--trace", "nothing.csv"], "nothing.csv"),
        (["--preempt-rate", "0.1", "--deadline", "0"], "--deadline 0: expected a number above 0"),
        (["--preempt-rate", "0.1", "--micro-batch", "4,7"], "--micro-batch 7: expected sizes of which training."),
    ],
)
def test_wrong_flags_get_one_sentence(files: Path, arguments: list[str], told: str) -> None:
    done = invoke(files, *arguments)
    assert done.exit_code == 2
    assert told in done.output
    assert "Traceback" not in done.output


PRICED = {"at": 0, "zone": "x-a", "price": 0.5}


@pytest.mark.parametrize(
    ("nodes", "entries", "told"),
    [
        ({}, [], "no node is in it; --trace needs a recording of nodes"),
        ({}, [PRICED], "no node is in it; --trace needs a recording of nodes"),
        ({"": 4}, [PRICED], "it has prices for x-a, and none for nodes that say no zone; say their zone"),
    ],
)
def test_recordings_without_nodes_or_their_prices_are_refused(
    files: Path, nodes: dict[str, int], entries: list[dict[str, object]], told: str
) -> None:
    path = str(files / "nodes.jsonl")
    Path(path).write_text(recording(3600, nodes, *entries))
    simulate = ["simulate", str(files / "job.yaml"), "--profile", str(files / "profile.json"), "--trace", path]
    for done in (invoke(files, "--trace", path), CliRunner().invoke(app, simulate)):
        assert done.exit_code == 2
        assert done.stderr.startswith("bamboo: ")
        assert told in done.stderr


ZONE = "topology.kubernetes.io/zone"


def place(folder: Path, **pod: Any) -> None:
    """Set the pod template in the job's manifest."""
    document = yaml.safe_load((folder / "job.yaml").read_text())
    document["spec"]["worker"] = {"template": {"spec": pod}}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))


def test_a_job_that_names_its_zone_is_planned_there(files: Path) -> None:
    place(files, nodeSelector={ZONE: "c"})
    document = yaml.safe_load((files / "job.yaml").read_text())
    found = json.loads(invoke(files, *QUICK, "--zones", "a,b,c", "--output", "json").stdout)
    assert found["recommended"]["manifest"]["spec"]["worker"] == document["spec"]["worker"]
    done = invoke(files, *QUICK, "--zones", "a,b")
    told = "worker.template lets workers be in c only (topology.kubernetes.io/zone), and nodes are in a, b"
    assert (done.exit_code, told in done.output) == (2, True)


def budgeted(folder: Path, budget: dict[str, str]) -> None:
    document = yaml.safe_load((folder / "job.yaml").read_text())
    document["spec"] |= {"budget": budget, "nodePools": [{"name": "spot", "pricePerHour": "1"}]}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))


def test_the_budget_of_the_manifest_bounds_the_plan(files: Path) -> None:
    """The plan keeps to the manifest's budget.money and budget.doneBy; the flag --budget replaces budget.money."""
    date = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    budgeted(files, {"money": "50", "doneBy": date})
    done = invoke(files, *QUICK)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "It is the cheapest that ends within 2.00 h and costs at most 50.0 USD " in told
    document = json.loads(invoke(files, *QUICK, "--output", "json", "--budget", "60").stdout)
    assert document["budget"] == 60, "flags come before the manifest"
    assert document["deadlineHours"] == pytest.approx(2.0, abs=0.1)
