"""The objective Value: the real coordinator keeps only as many workers as are worth their price."""

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Change, NodeChange, PriceChange, Trace, make_trace
from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import PreemptionNotice, Tick, WorkerLost
from bamboo_core.coordinator.grids import holding
from bamboo_core.coordinator.grids.holding import to_have
from bamboo_core.coordinator.records.grids import Exposure, Holding
from bamboo_core.coordinator.records.workers import WorkerEnds
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.steps.grid_rates import GridRates
from job_simulation_kit import HOUR, job, manifest, nodes, profile, run


def valued(
    workers: int, layers: int = 12, stages: int | None = None, pipelines: int | None = None, **elastic: Any
) -> JobRun:
    """Return a job of 24 microbatches and one node pool. stages, pipelines: None if the coordinator chooses."""
    made = job()
    more = {"maxWorkers": workers, "objective": "Value", "stabilizationSeconds": 60, **elastic}
    pools = [{"name": "spot", "capacity": "Spot", "pricePerHour": "1.5"}]
    document = manifest(stages, pipelines, 24, elastic=more, nodePools=pools)
    document["spec"]["topology"]["schedule"] = "1F1B"
    model = profile(layers, made.profile.network, forward=0.02, backward=0.04)
    model = msgspec.structs.replace(model, times=made.profile.times)
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def other(one: JobRun, objective: str) -> JobRun:
    spec = one.manifest["spec"]
    document = {**one.manifest, "spec": {**spec, "elastic": {**spec["elastic"], "objective": objective}}}
    return replace(one, spec=parse_manifest(document), manifest=document)


def both(one: JobRun, trace: Trace) -> tuple[JobResult, JobResult, list[str]]:
    """Run a job with the objectives Value and Throughput. Return both results, and the log of the first."""
    told: list[str] = []
    return run(one, trace, told=told), run(other(one, "Throughput"), trace), told


def held(told: list[str]) -> list[int]:
    """Return the numbers of workers that the coordinator chose, in the order of the log."""
    return [int(found[1]) for line in told if (found := re.search(r"WorkersChosen: (\d+) of", line))]


# what is held


def test_workers_that_add_less_than_they_cost_are_given_back() -> None:
    """Seven equal layers are hardly faster on six workers than on four, so the job gives the surplus workers back."""
    one = valued(6, layers=7, pipelines=1, minStages=2)
    value, speed, told = both(one, nodes(6, duration=3 * HOUR))
    rates = GridRates(one.profile.figures, one.spec)
    batch = 1 / rates.best(6).seconds
    fewest = next(n for n in range(1, 7) if rates.best(n) and 1 / rates.best(n).seconds >= holding.AS_FAST * batch)
    assert fewest < 6, "or there would be nothing to give back"
    assert held(told) == [fewest]
    assert sum("GivenBack" in line for line in told) == 6 - fewest
    assert value.figures.steps > 0.94 * speed.figures.steps
    assert value.figures.value > 1.1 * speed.figures.value
    assert (value.figures.preemptions, value.figures.repeated, value.figures.restores) == (0, 0, 0)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_number_of_workers_does_not_go_to_and_fro(seed: int) -> None:
    one = valued(12, stabilizationSeconds=120)
    trace = generate(Generation(nodes=12, hours=8, removal=0.2, addition=0.9), seed)
    value, speed, told = both(one, trace)
    assert len(held(told)) <= 4
    assert value.figures.value > 0.99 * speed.figures.value
    assert value.figures.restores == 0


def test_those_that_cost_more_go_first() -> None:
    """The job gives back only workers of the more expensive of its two zones.

    The exchange of gradients takes so long that eight pipelines are hardly faster than six.
    """
    one = valued(8, layers=7, stages=1)
    layers = tuple(msgspec.structs.replace(layer, gradients=600_000) for layer in one.profile.layers)
    one = replace(one, profile=msgspec.structs.replace(one.profile, layers=layers))
    trace = nodes(8, duration=2 * HOUR)
    changes = [replace(change, zone="dear" if i % 2 else "cheap") for i, change in enumerate(trace.changes)]
    prices = [PriceChange(at=0.0, zone="dear", usd_per_hour=3.0), PriceChange(at=0.0, zone="cheap", usd_per_hour=1.0)]
    told: list[str] = []
    run(one, make_trace(changes, prices, duration=2 * HOUR), told=told)
    zones = {found[1]: found[2] for line in told if (found := re.search(r": (\S+) joined .*in zone (\w+)", line))}
    gone = [found[1] for line in told if (found := re.search(r"GivenBack: (\S+) ", line))]
    assert gone
    assert {zones[worker] for worker in gone} == {"dear"}


# what the coordinator is told, and what it sees itself


def state_of(workers: int = 4, **elastic: Any) -> CoordinatorState:
    """Return the state after `workers` workers have joined, in zones a and b in turn."""
    one = valued(4, **elastic)
    state = coordinator.initial(one.spec, one.manifest, secret="", now=0.0)
    for i in range(workers):
        hello = protocol.Hello(worker=f"w{i}", host="h", port=1, zone="ab"[i % 2])
        state, _ = coordinator.step(state, WorkerJoined(hello), 0.0)
    return state


def test_zones_are_judged_by_their_losses_for_each_hour_of_a_worker() -> None:
    state = state_of()
    state = replace(state, holding=holding.seen(state, 0.0))
    state, _ = coordinator.step(state, WorkerLost("w0", "its node is gone"), 10 * HOUR)
    state = replace(state, holding=holding.seen(state, 10 * HOUR))
    assert state.holding.zones == {"a": Exposure(losses=1, hours=10.0)}
    a, b = (holding.hazard(state, zone, 10 * HOUR) for zone in "ab")
    assert a == pytest.approx((1 + 1) / (20 + 10 + 10))
    assert b == pytest.approx(1 / (20 + 20))
    assert holding.hazard(state, "unknown", 10 * HOUR) == pytest.approx(1 / 20)


def test_a_notice_of_the_cloud_counts_as_a_loss_and_our_own_does_not() -> None:
    for wanted, losses in ((False, 1), (True, 0)):
        state = state_of()
        state = replace(state, holding=holding.seen(state, 0.0))
        state, _ = coordinator.step(state, PreemptionNotice("w1", 100.0, wanted=wanted), HOUR)
        assert holding.seen(state, HOUR).zones["b"].losses == losses


def test_whoever_is_lost_counts_once_in_whatever_order_that_is_heard_of() -> None:
    """A lost worker counts as one loss, whether `WorkerLost` comes at once, after its channel closed, or never."""
    orders = {
        "known at once": [WorkerLost("w1", "its node is gone")],
        "it failed": [WorkerLost("w1", "exited", 1)],
        "missed first": [ChannelClosed("w1"), "others are there", "commit", WorkerLost("w1", "its node is gone")],
        "missed, and it failed": [ChannelClosed("w1"), "others are there", "commit", WorkerLost("w1", "exited", 1)],
        "missed for good": [ChannelClosed("w1"), "others are there", "commit"],
    }
    for name, events in orders.items():
        state = state_of()
        state = replace(state, holding=holding.seen(state, 0.0))
        for event in events:
            if event == "commit":
                state = replace(state, worker_ends=WorkerEnds())
            elif event == "others are there":
                for worker in ("w0", "w2", "w3"):
                    here = Received(worker, protocol.Heartbeat(step=0, doing="", busy=0.0))
                    state, _ = coordinator.step(state, here, HOUR)
                state, _ = coordinator.step(state, Tick(), HOUR)
            else:
                state, _ = coordinator.step(state, event, HOUR - 600.0)
            state = replace(state, holding=holding.seen(state, HOUR))
        assert state.workers.keys() == {"w0", "w2", "w3"}, name
        assert {zone: was.losses for zone, was in state.holding.zones.items()} == {"b": 1}, name


@pytest.mark.parametrize(
    ("objective", "target", "standby", "wanted"),
    [("Value", None, 0, 8), ("Value", 3, 0, 3), ("Value", 3, 1, 4), ("Value", 20, 0, 8), ("Throughput", 3, 0, 8)],
)
def test_as_many_workers_are_asked_for_as_are_held(
    objective: str, target: int | None, standby: int, wanted: int
) -> None:
    document = manifest(2, None, 24, elastic={"objective": objective, "maxWorkers": 8}, standby={"workers": standby})
    state = coordinator.initial(parse_manifest(document), document, secret="", now=0.0)
    known = replace(state, holding=Holding(target=target))
    assert to_have(known) == min(wanted, 8 + standby)


def test_a_loss_is_no_reason_to_split_layers_anew_for_the_sake_of_prices() -> None:
    """Different prices of zones do not make a job split its layers anew after a loss."""
    one = valued(6, layers=2, stages=2)
    prices = [PriceChange(at=0.0, zone=zone, usd_per_hour=usd) for zone, usd in (("a", 1.0), ("b", 1.2))]
    there = [NodeChange(at=0.0, change=Change.ADD, node=f"n{i}", zone="ab"[i % 2]) for i in range(6)]
    gone = [NodeChange(at=at, change=Change.REMOVE, node=node) for at, node in ((3600.0, "n1"), (3600.0, "n3"))]
    told: list[str] = []
    found = run(one, make_trace([*there, *gone], prices, duration=2 * HOUR), told=told)
    assert held(told) in ([], [6]), "all are worth their price"
    assert found.figures.preemptions == 2
    assert not any("Resplitting" in line for line in told), told
