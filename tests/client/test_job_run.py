"""`bamboo simulate JOB.yaml`: the real coordinator in virtual time, under traces."""

import random
import re
from typing import Any

import msgspec
import pytest

from bamboo.jobs.simulating import simulate_seeds
from bamboo.simulation.job.job_run import JobRun
from bamboo.traces.generate import Generation
from bamboo.traces.trace import make_trace
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Event, Tick
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import Machine, Network
from job_simulation_kit import HOUR, job, manifest, nodes, profile, run


def test_without_preemptions_nothing_is_lost() -> None:
    found = run(job(), nodes(3), price=2.0).figures
    assert found.goodput == pytest.approx(1.0, abs=1e-3)
    assert (found.preemptions, found.takeovers, found.restores, found.pause) == (0, 0, 0, 0.0)
    assert found.nodes == pytest.approx(3)
    assert found.usd == pytest.approx(6.0)
    assert found.steps == pytest.approx((HOUR - 10) / 0.247, rel=0.02)


def test_a_job_that_is_short_comes_to_its_end() -> None:
    """A short job does all its steps; its evaluation takes no time in a simulation."""
    one = job()
    document = {**one.manifest, "spec": {**one.manifest["spec"]}}
    document["spec"]["training"] = {**document["spec"]["training"], "steps": 500, "evaluation": {"everySteps": 100}}
    short = JobRun(spec=parse_manifest(document), manifest=document, profile=one.profile, trace=make_trace())
    result = run(short, nodes(3))
    assert (result.outcome, result.figures.steps) == ("Complete", 500)
    assert result.figures.hours * HOUR == pytest.approx(10 + 500 * 0.247, rel=0.02)


def test_a_lost_worker_costs_a_pause_and_then_a_slower_pipeline() -> None:
    """Without a replacement the neighbour runs two of three stages for the rest of the hour."""
    told: list[str] = []
    result = run(job(), nodes(3, (1810.0, "remove", "n1")), told=told)
    found = result.figures
    assert (found.preemptions, found.takeovers, found.restores) == (1, 1, 0)
    assert 1.0 < found.pause < 2.0  # a second until it is known, and the work of less than a step
    assert 0.7 < found.goodput < 0.85
    rates = result.series.throughput
    assert rates[40] / rates[160] == pytest.approx(12 * 0.03 / 0.247, rel=0.1)
    assert any("Takeover: lost" in line for line in told)


def test_workers_with_several_devices_are_lost_as_one() -> None:
    """Three workers of two devices run 6 layers in three stages. After a loss, one of the other two runs two stages."""
    one = job(devices=2)
    calm = run(one, nodes(3), price=2.0).figures
    assert calm.steps == pytest.approx((HOUR - 10) / (0.03 * (6 + 5) + 0.007), rel=0.02)
    assert calm.usd == pytest.approx(6.0), "a node's price, whatever is in it"
    result = run(one, nodes(3, (1810.0, "remove", "n1")))
    assert (result.figures.preemptions, result.figures.takeovers, result.figures.restores) == (1, 1, 0)
    rates = result.series.throughput
    assert 1.1 < rates[40] / rates[160] < 2


def test_with_notice_nobody_waits() -> None:
    found = run(job(standby={"workers": 1}), nodes(4, (1800.0, "remove", "n1"), notice=120.0)).figures
    assert found.preemptions == 1
    assert found.pause == 0.0
    assert found.goodput == pytest.approx(1.0, abs=2e-3)


def test_workers_of_one_stage_pipelines_share_what_is_lost() -> None:
    """When one of four single-stage pipelines with 6 microbatches each is lost, the others run 8 each, and no worker
    runs 12.
    """
    told: list[str] = []
    document = manifest(1, 4, 24)
    one = JobRun(spec=parse_manifest(document), manifest=document, profile=job(1).profile, trace=make_trace())
    result = run(one, nodes(4, (1800.0, "remove", "n1")), told=told)
    assert result.figures.takeovers == 1
    assert 0 < result.figures.pause < 2
    rates = result.series.throughput
    assert 6 / 8 * 0.9 < rates[160] / rates[40] <= 6 / 8 * 1.05


def test_a_standby_heals_the_pipeline() -> None:
    told: list[str] = []
    found = run(job(standby={"workers": 1}), nodes(4, (1800.0, "remove", "n1")), told=told).figures
    assert found.goodput == pytest.approx(1.0, abs=5e-3)
    assert any("Healed" in line for line in told)


def test_two_neighbours_at_once_go_back_to_a_checkpoint() -> None:
    checkpoint = {"storage": "file:///tmp/x", "everySteps": 100}
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


def test_to_wait_for_nodes_takes_little_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of all workers, the coordinator waits for half an hour with a tick only every few seconds."""
    heard: list[Event] = []
    step = coordinator.step

    def counted(state: CoordinatorState, event: Event, now: float) -> Any:
        heard.append(event)
        return step(state, event, now)

    monkeypatch.setattr(coordinator, "step", counted)
    checkpoint = {"storage": "file:///tmp/x", "everySteps": 100}
    gone = [(1800.0, "remove", f"n{i}") for i in range(3)]
    result = run(job(checkpoint=checkpoint), nodes(3, *gone))
    assert result.figures.waited * HOUR == pytest.approx(10 + 1800, abs=5)
    assert sum(isinstance(event, Tick) for event in heard) < 1800


def test_a_replica_that_is_complete_after_a_cut_is_copied_for_it_too() -> None:
    """If the new replica made no copies for the cut, the coordinator would wait 60 s for them."""
    document = manifest(None, 1, 24, elastic={"maxWorkers": 9, "stabilizationSeconds": 10})
    document["spec"]["topology"]["schedule"] = "1F1B"
    sizes = {"parameters": 132704792, "optimizer": 265409584, "gradients": 10**8, "boundary": 10**6}
    model = profile(9, Network(flow=1e9, machine=2e9, latency=0.001), forward=0.05, backward=0.1, **sizes)
    times = msgspec.structs.replace(model.times, start=10.0, detection=1.0)
    model = msgspec.structs.replace(model, times=times, machine=Machine(memory=10**12))
    one, told = JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace()), list[str]()
    run(one, nodes(9, (600.0, "remove", "n8"), (610.36, "remove", "n0")), told=told)
    moved = [float(found[1]) for line in told if (found := re.search(r"after ([\d.]+) s in which layers moved", line))]
    assert any("begins again there" in line for line in told)
    assert max(moved) < 5


def test_a_small_run_is_always_the_same() -> None:
    """These figures are golden: if they change, so do the figures in docs; say why in the commit."""
    generation = Generation(nodes=6, hours=6, removal=0.5, addition=0.9, zones=("a", "b"))
    one = job(3, None, elastic={"maxWorkers": 6}, nodePools=[{"name": "spot", "pricePerHour": "1.0"}])
    cases = [(generation, seed) for seed in (1, 2, 3, 4)]
    told: list[int] = []
    found = [result.figures for result in simulate_seeds(one, cases, 2, told.append)]
    assert found == [result.figures for result in simulate_seeds(one, cases, 1, lambda count: None)]
    assert sum(told) == 4
    assert [(one.preemptions, one.takeovers, one.restores, one.steps) for one in found] == GOLDEN


GOLDEN = [(13, 13, 0, 100000), (9, 11, 0, 100000), (9, 9, 0, 100000), (6, 6, 0, 14274)]


@pytest.mark.parametrize(
    ("stages", "pipelines"),
    [(4, 1), (4, 4), pytest.param(7, 1, marks=pytest.mark.slow), pytest.param(2, 4, marks=pytest.mark.slow)],
)
def test_losses_every_third_of_a_step_do_not_hold_it_for_ever(stages: int, pipelines: int) -> None:
    """Workers lost every third of a 188 s step, and replaced 18.8 s later, never make a step four times as long."""
    document, step, count = manifest(stages, pipelines, 32 * pipelines), 188.0, stages * pipelines
    forward, network = step / (32 + stages - 1) / 3, Network(flow=1e9, machine=2e9, latency=0.001)
    model = profile(stages, network, forward=forward, backward=2 * forward, gradients=10**9, boundary=10**7)
    times = msgspec.structs.replace(model.times, start=10.0, detection=1.0)
    model = msgspec.structs.replace(model, times=times)
    pick, workers, changes = random.Random(stages), [f"n{i}" for i in range(count)], list[tuple[float, str, str]]()
    for number in range(int(HOUR / step * 3) - 1):
        at, new = step * (number + 1) / 3, f"n{count + number}"
        lost = workers.pop(pick.randrange(count))
        workers.append(new)
        changes += [(at, "remove", lost), (at + step / 10, "add", new)]
    one = JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())
    result = run(one, nodes(count, *sorted(changes)))
    assert (result.outcome, result.figures.restores) == ("cut", 0)
    assert max(until - begun for begun, until, _ in result.steps) < 4 * step
    assert len(result.steps) > HOUR / step / 4
