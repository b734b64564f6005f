"""`bamboo simulate JOB.yaml`: the real coordinator in virtual time, under traces, and the command."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from test_step_times import manifest, profile
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.job.manifest import parse_manifest
from bamboo.profiles.profile import Machine, Network, to_json
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.simulation.job.worker_memory import device_bytes, memory_warning
from bamboo.simulation.pool import JobSeed, simulate_jobs
from bamboo.traces.generate import Generation
from bamboo.traces.trace import Change, NodeChange, PriceChange, Trace, make_trace

HOUR = 3600.0
NETWORK = Network(flow=1e6, machine=2e6, latency=0.001)


def job(stages: int = 3, pipelines: int = 1, **more: Any) -> JobRun:
    """Layers of 10 and 20 ms; a step of three stages takes 0.24 s for 6 microbatches."""
    document = manifest(stages, pipelines, 6, **more)
    model = profile(stages, NETWORK, forward=0.01, backward=0.02)
    times = msgspec.structs.replace(model.times, start=10.0, detection=1.0)
    model = msgspec.structs.replace(model, times=times)
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def nodes(count: int, *changes: tuple[float, str, str], duration: float = HOUR, notice: float | None = None) -> Trace:
    """Nodes n0, n1 ... from the beginning on; changes: (second, "add" or "remove", node)."""
    first = [NodeChange(at=0.0, change=Change.ADD, node=f"n{i}") for i in range(count)]
    later = [NodeChange(at=at, change=Change(what), node=node, notice=notice) for at, what, node in changes]
    return make_trace([*first, *later], duration=duration)


def run(one: JobRun, trace: Trace, **more: Any) -> JobResult:
    told: list[str] = more.pop("told", [])
    wanted = JobRun(spec=one.spec, manifest=one.manifest, profile=one.profile, trace=trace, **more)
    return simulate_job(wanted, told.append)


def test_without_preemptions_nothing_is_lost() -> None:
    found = run(job(), nodes(3), price=2.0).figures
    assert found.goodput == pytest.approx(1.0, abs=1e-3)
    assert (found.preemptions, found.takeovers, found.restores, found.pause) == (0, 0, 0, 0.0)
    assert found.nodes == pytest.approx(3)
    assert found.usd == pytest.approx(6.0)
    assert found.steps == pytest.approx((HOUR - 10) / 0.247, rel=0.02)


def test_a_job_that_is_short_comes_to_its_end() -> None:
    one = job()
    document = {**one.manifest, "spec": {**one.manifest["spec"]}}
    document["spec"]["training"] = {**document["spec"]["training"], "steps": 500}
    short = JobRun(spec=parse_manifest(document), manifest=document, profile=one.profile, trace=make_trace())
    result = run(short, nodes(3))
    assert (result.outcome, result.figures.steps) == ("Complete", 500)
    assert result.figures.hours * HOUR == pytest.approx(10 + 500 * 0.247, rel=0.02)


def test_a_lost_worker_costs_a_pause_and_then_a_slower_pipeline() -> None:
    """Nobody takes its place: the neighbour runs two of three stages, for the rest of the hour."""
    told: list[str] = []
    result = run(job(), nodes(3, (1810.0, "remove", "n1")), told=told)
    found = result.figures
    assert (found.preemptions, found.takeovers, found.restores) == (1, 1, 0)
    assert 1.0 < found.pause < 2.0  # a second until it is known, and the work of less than a step
    assert 0.7 < found.goodput < 0.85
    rates = result.series.throughput
    assert rates[40] / rates[160] == pytest.approx(12 * 0.03 / 0.247, rel=0.1)
    assert any("Takeover: lost" in line for line in told)


def test_with_notice_nobody_waits() -> None:
    found = run(job(standby={"workers": 1}), nodes(4, (1800.0, "remove", "n1"), notice=120.0)).figures
    assert found.preemptions == 1
    assert found.pause == 0.0
    assert found.goodput == pytest.approx(1.0, abs=2e-3)


def test_workers_of_one_stage_pipelines_share_what_is_lost() -> None:
    """Four pipelines of one stage, 6 microbatches each, and one is lost for good: the others run 8 each, not 12."""
    told: list[str] = []
    document = manifest(1, 4, 24, elastic={"minPipelines": 4, "maxPipelines": 4})
    one = JobRun(spec=parse_manifest(document), manifest=document, profile=job(1).profile, trace=make_trace())
    result = run(one, nodes(4, (1800.0, "remove", "n1")), told=told)
    assert result.figures.takeovers == 1
    assert 0 < result.figures.pause < 2
    rates = result.series.throughput
    assert 6 / 8 * 0.9 < rates[160] / rates[40] <= 6 / 8 * 1.05


def test_a_node_with_notice_is_not_used_again() -> None:
    """Its worker leaves before the end of the notice; the node is there until then, and no place for another one."""
    told: list[str] = []
    run(job(), nodes(3, (1800.0, "remove", "n1"), notice=600.0), told=told)
    assert any("has left after its notice" in line for line in told)
    assert sum("WorkerJoined" in line for line in told) == 3


def test_a_standby_heals_the_pipeline() -> None:
    told: list[str] = []
    found = run(job(standby={"workers": 1}), nodes(4, (1800.0, "remove", "n1")), told=told).figures
    assert found.goodput == pytest.approx(1.0, abs=5e-3)
    assert any("Healed" in line for line in told)


def test_two_neighbours_at_once_go_back_to_a_checkpoint() -> None:
    checkpoint = {"storage": {"uri": "file:///tmp/x"}, "everySteps": 100}
    changes = [(1800.0, "remove", "n0"), (1800.0, "remove", "n1"), (1900.0, "add", "n8"), (1900.0, "add", "n9")]
    told: list[str] = []
    found = run(job(checkpoint=checkpoint), nodes(3, *changes), told=told).figures
    assert (found.preemptions, found.restores, found.fatal) == (2, 1, 1)
    assert 0 < found.repeated <= 100
    assert found.waited * HOUR == pytest.approx(10 + 111, abs=5)
    assert found.goodput == pytest.approx(1 - (110 + found.repeated * 0.247) / (HOUR - 10), abs=0.01)
    lost = run(job(), nodes(3, *changes))
    assert lost.outcome == "Unrecoverable"
    assert "not recoverable without a checkpoint" in lost.message


def test_the_number_of_pipelines_follows_the_nodes() -> None:
    told: list[str] = []
    changes = [(1000.0, "remove", "n5"), (2000.0, "add", "n9")]
    found = run(job(3, 2, elastic={"minPipelines": 1}), nodes(6, *changes), told=told).figures
    assert any("Shrinking" in line for line in told)
    assert any("Growing" in line for line in told)
    assert 0.8 < found.goodput < 1.0


def test_layers_are_split_anew_over_fewer_workers() -> None:
    told: list[str] = []
    one = job(3, 1, elastic={"minStages": 1, "stabilizationSeconds": 60})
    found = run(one, nodes(3, (1000.0, "remove", "n2")), told=told)
    assert any("Resplit:" in line for line in told)
    assert found.outcome == "cut"
    assert found.figures.restores == 0


def test_nodes_that_are_not_wanted_cost_nothing_and_pools_on_demand_come_in() -> None:
    assert run(job(), nodes(10), price=1.0).figures.usd == pytest.approx(3.0)
    pools = [
        {"name": "spot", "capacity": "Spot", "pricePerHour": "1"},
        {"name": "safe", "capacity": "OnDemand", "pricePerHour": "3", "afterSeconds": 60},
    ]
    found = run(job(nodePools=pools), nodes(2)).figures
    assert found.usd == pytest.approx(2 * 1 + 3 * (1 - 60 / HOUR), rel=1e-3)
    assert found.waited * HOUR == pytest.approx(70, abs=1)


def test_prices_follow_the_trace() -> None:
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=1.0), PriceChange(at=1800.0, zone="", usd_per_hour=2.0)]
    trace = make_trace(nodes(3).changes, prices, duration=HOUR)
    assert run(job(), trace).figures.usd == pytest.approx(3 * 1.5)
    assert run(job(), nodes(3)).figures.usd != run(job(), nodes(3)).figures.usd  # not a number: no price is known


def test_a_small_run_is_always_the_same() -> None:
    """Golden: if this changes, so do the figures in docs; say why in the commit."""
    generation = Generation(nodes=6, hours=6, removal=0.5, addition=0.9, zones=("a", "b"), price=1.0)
    one = job(3, 2, elastic={"minPipelines": 1})
    runs = [JobSeed(run=one, generation=generation, seed=seed) for seed in (1, 2, 3, 4)]
    told: list[int] = []
    found = [result.figures for result in simulate_jobs(runs, 2, told.append)]
    assert found == [result.figures for result in simulate_jobs(runs, 1, lambda count: None)]
    assert sum(told) == 4
    assert [(one.preemptions, one.takeovers, one.restores, one.steps) for one in found] == GOLDEN


GOLDEN = [(14, 14, 0, 87929), (13, 13, 0, 98046), (11, 8, 0, 92857), (6, 4, 0, 11910)]


# the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    one = job(3, 2, elastic={"minPipelines": 1})
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
    assert invoke(*common, "--output", "csv", "--price", "1").stdout.startswith("case,runs,fatal_share,preemptions,")


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


def test_a_machine_that_is_too_small_is_told(files: tuple[str, str]) -> None:
    """Two layers a worker, with its replica: parameters, gradients twice (two pipelines) and what AdamW remembers."""
    one = job(3, 2)
    assert device_bytes(one.profile, one.spec, taken_over=False) == 2 * 300 + 2 * 2 * 100 + 100
    assert device_bytes(one.profile, one.spec, taken_over=True) == 3 * 300 + 2 * 3 * 100 + 100
    assert memory_warning(one.profile, one.spec) == ""
    small = msgspec.structs.replace(one.profile, machine=Machine(memory=1200))
    told = "a worker needs about 0.0 GB while it runs a lost neighbour's stage, too, and a machine of the profile has"
    assert memory_warning(small, one.spec).startswith(told)


def test_more_stages_than_layers_are_named() -> None:
    one = job(3)
    few = msgspec.structs.replace(one.profile, layers=one.profile.layers[:2])
    with pytest.raises(SimulationError, match=r"expected at most the model's 2 layers, got 3 \(of the profile tiny\)"):
        simulate_job(JobRun(spec=one.spec, manifest=one.manifest, profile=few, trace=nodes(3)))
