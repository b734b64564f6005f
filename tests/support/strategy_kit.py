"""A profile, timelines of nodes and costs, for tests of the strategies with which Bamboo is compared."""

import pytest

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import (
    SOURCES,
    Layer,
    Machine,
    ModelProfile,
    Network,
    Prices,
    Source,
    Storage,
    Times,
)
from manifest_kit import bamboojob, training
from strategies.costs import Costs
from strategies.drive import StrategyResult, drive
from strategies.policy import Policy
from strategies.timeline import NodesChange, Timeline

START, DETECTION, RENDEZVOUS, REGROUP = 10.0, 5.0, 30.0, 8.0


FREE = 1e15  # a network that takes no time


def profile(
    layers: int = 4, *, state: int = 0, flow: float = FREE, memory: int = 1000, activations: int = 0
) -> ModelProfile:
    """Return a profile whose layers take a second each per sample; by default network and storage take no time."""
    layer = Layer(
        forward=0.25, backward=0.75, parameters=state, optimizer=0, gradients=0, boundary=0, activations=activations
    )
    return ModelProfile(
        name="made-up",
        device="none",
        samples=1,
        layers=(layer,) * layers,
        network=Network(flow=flow, machine=flow),
        storage=Storage(write=flow, read=flow),
        times=Times(start=START, detection=DETECTION, rendezvous=RENDEZVOUS, regroup=REGROUP),
        machine=Machine(memory=memory),
        prices=Prices(spot=1.0, on_demand=3.0),
        sources={name: Source(text="made up") for name in (*SOURCES, "prices")},
    )


def nodes(*changes: tuple[float, str, str], duration: float) -> Timeline:
    """Return a timeline. changes: (seconds, joined, lost), with names separated by spaces."""
    return Timeline(
        duration=duration,
        node_seconds=duration,
        usd=1.0,
        removed=0,
        changes=tuple(NodesChange(at=at, joined=tuple(j.split()), lost=tuple(g.split())) for at, j, g in changes),
    )


def run(policy: Policy, *changes: tuple[float, str, str], duration: float) -> StrategyResult:
    found = drive(policy, nodes(*changes, duration=duration))
    spent = found.productive + found.redone + found.stalled + found.idle + found.saving
    assert spent == pytest.approx(duration)
    return found


def costs_of(model: ModelProfile, batch: int, schedule: str | None = "1F1B") -> Costs:
    """Return the costs of a job with microbatches of one sample."""
    topology = {"stages": 1, "schedule": schedule}
    document = bamboojob(task={"entrypoint": "a:build"}, training=training(10, batch, 1), topology=topology)
    return Costs(model, parse_manifest(document))


COSTS = costs_of(profile(), 8)  # 4 layers of 1 s, 8 microbatches of one sample
