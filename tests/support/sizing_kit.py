"""Profiles of a made-up machine, a made-up market, and outcomes of trials, for tests of sizing."""

from dataclasses import asdict, replace
from typing import Any

import msgspec
from hypothesis import strategies as st

from bamboo.simulation.job.job_record import JobRecord
from bamboo.sizing.pareto import Point
from bamboo.sizing.trials.candidate import as_the_job_is
from bamboo.sizing.trials.trial import Assessment, TrialOutcome
from bamboo.sizing.trials.world import MachineKind, Market, World
from bamboo.traces.generate import Generation
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import ModelProfile, Prices
from job_simulation_kit import job, manifest

POINTS = st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=40)
PRICES = {
    "format": "bamboo-prices",
    "version": 1,
    "source": "nobody",
    "machines": {"small": {"spot": 1.0, "onDemand": 3.0}},
}


def layered(layers: int, memory: int = 1 << 40) -> ModelProfile:
    one = job(3).profile
    machine = msgspec.structs.replace(one.machine, memory=memory)
    return msgspec.structs.replace(
        one,
        layers=one.layers[:1] * layers,
        machine=machine,
        prices=Prices(spot=1.0, on_demand=3.0),
        sources={**one.sources, "prices": one.sources["network"]},
    )


def world(document: dict[str, Any], profile: ModelProfile, *, rate: float = 0.5, seeds: int = 2) -> World:
    generation = Generation(nodes=4, removal=rate, addition=0.9, zones=("a", "b"))
    return World(
        spec=parse_manifest(document),
        document=document,
        machines={"m": MachineKind(profile=profile)},
        market=Market(generation=generation),
        hours=0.4,
        seeds=seeds,
        traffic_price=0.01,
    )


def outcome(hours: float, usd: float, **more: Any) -> TrialOutcome:
    usual = {
        **asdict(JobRecord(samples=1).figures(3600.0)),
        "nodes": 1.0,
        "value": 1.0,
        "goodput": 1.0,
        "throughput": 1.0,
    }
    usual |= {"hours": hours, "usd": usd, "preemptions": 1, "traffic_usd": 0.0, "simulated": 1.0}
    return TrialOutcome(**usual | more)


def assessed(number: int, *points: Point) -> Assessment:
    one = as_the_job_is("m", parse_manifest(manifest(2, 1, 4)))
    return Assessment(candidate=replace(one, stages=number), outcomes=tuple(outcome(*point) for point in points))
