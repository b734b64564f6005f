"""`bamboo compare`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app

pytest_plugins = ["job_simulation_fixtures"]


def test_the_command() -> None:
    def called(*arguments: str) -> Any:
        flags = ["compare", "--seeds", "1", "--hours", "2", "--preempt-rate", "0.3", *arguments]
        return CliRunner().invoke(app, flags)

    done = called("--strategy", "bamboo", "--strategy", "checkpoint", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["case"] for one in found] == ["0.3 bamboo", "0.3 checkpoint"]
    assert found[0]["mean"]["goodput"] > found[1]["mean"]["goodput"] > 0
    assert called("--strategy", "bamboo", "--workload", "vgg").stdout.count("\n") == 2
    for arguments, problem in (
        (("--strategy", "x"), "--strategy must be one of on-demand, checkpoint"),
        (("--trace", "t.csv"), "--preempt-rate: cannot be combined with --trace"),
        (("job.yaml",), "--profile: expected what `bamboo profile job.yaml` writes"),
        (("job.yaml", "--workload", "vgg"), "--workload: cannot be combined with JOB.yaml"),
        (("--workload", "x"), "cannot read the profile x-v100"),
    ):
        refused = called(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert problem in refused.stderr


def test_hours_beyond_a_recording_end_with_it(tmp_path: Path) -> None:
    """As those of a job do."""
    trace = tmp_path / "t.csv"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(24)) + "1800000,remove,n4\n3600000,remove,n5\n")
    several = ("bamboo", "checkpoint", "quorum", "on-demand")
    flags = [flag for name in several for flag in ("--strategy", name)]
    said = ["compare", *flags, "--workload", "vgg", "--trace", str(trace), "-o", "json", "--quiet"]
    whole, beyond, short = (
        CliRunner().invoke(app, [*said, *hours]) for hours in ((), ("--hours", "5"), ("--hours", "0.5"))
    )
    assert whole.exit_code == beyond.exit_code == short.exit_code == 0, beyond.output
    assert whole.stdout == beyond.stdout
    assert [one["mean"]["hours"] for one in json.loads(whole.stdout)] == [1.0] * len(several)
    assert [one["mean"]["hours"] for one in json.loads(short.stdout)] == [0.5] * len(several)


def test_a_job_of_ones_own_is_compared(files: tuple[str, str]) -> None:
    """Its batch, its grid and its pools' prices; it had to be a published model."""
    job, profile = files
    flags = ["--strategy", "bamboo", "--strategy", "on-demand", "--profile", profile, "--preempt-rate", "0.3"]

    def called(*pools: dict[str, Any], devices: int = 1) -> Any:
        document = yaml.safe_load(Path(job).read_text())
        document["spec"] |= {"nodePools": list(pools), "worker": {"devices": devices}}
        Path(job).write_text(yaml.safe_dump(document))
        return CliRunner().invoke(app, ["compare", job, *flags, "--seeds", "1", "--hours", "2", "-o", "json"])

    spot = {"name": "s", "capacity": "Spot", "pricePerHour": "1"}
    refused = called(spot)
    told = f"bamboo: {job}: expected pricePerHour in a node pool of each capacity, or prices in the profile {profile}\n"
    assert (refused.exit_code, refused.stderr) == (2, told)
    later = {"name": "t", "capacity": "Spot", "pricePerHour": "2"}
    pools = (spot, later, {"name": "d", "capacity": "OnDemand", "pricePerHour": "3"})
    divided = called(*pools, devices=2)
    told = (
        f"bamboo: {job}: expected spec.worker.devices 1 with `bamboo compare`, whose nodes have one GPU each, got 2\n"
    )
    assert (divided.exit_code, divided.stderr) == (2, told)
    done = called(*pools)
    assert done.exit_code == 0, done.output
    ours, sure = (one["mean"] for one in json.loads(done.stdout))
    assert 0 < ours["nodes"] <= 6, "3 stages and 2 pipelines"
    assert ours["usd_per_hour"] == pytest.approx(ours["nodes"])
    assert sure["usd_per_hour"] == pytest.approx(3 * sure["nodes"])
