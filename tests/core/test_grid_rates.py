"""Rates of grids: which grids the workers can run, how fast each is, and which is the fastest."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Peer
from bamboo_core.planning.profile import Layer, ModelFigures, Network
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.planning.splits.resplit_plans import Grid
from bamboo_core.planning.steps.grid_rates import GridRate, GridRates, bounded_grids, is_within_bounds
from bamboo_core.planning.steps.step_times import StepModel
from bamboo_core.planning.steps.worker_memory import device_bytes
from job_simulation_kit import NETWORK, manifest, profile


def elastic_job(workers: int, microbatches: int, stages: int | None = None, **elastic: int) -> JobSpec:
    return parse_manifest(manifest(stages, None, microbatches, elastic={"maxWorkers": workers, **elastic}))


def figures_of(seconds: list[float], rate: float) -> ModelFigures:
    """Return figures of layers whose forwards take these seconds. rate: bytes per second of a connection."""
    layers = tuple(
        Layer(forward=one, backward=2 * one, parameters=400, optimizer=800, gradients=400, boundary=100)
        for one in seconds
    )
    return ModelFigures(layers=layers, network=Network(flow=rate, machine=2 * rate, latency=0.001))


@given(
    seconds=st.lists(st.floats(0.001, 1.0), min_size=3, max_size=6),
    workers=st.integers(0, 12),
    microbatches=st.integers(3, 20),
    rate=st.sampled_from([1e3, 1e5, 1e12]),
    memory=st.sampled_from([None, 4000]),
    most=st.integers(1, 4),
    scale=st.sampled_from([1.0, 0.7, 1.9]),
    measured=st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 20.0)), max_size=3),
)
def test_the_fastest_of_each_number_of_stages_are_those_of_all_grids(
    seconds: list[float],
    workers: int,
    microbatches: int,
    rate: float,
    memory: int | None,
    most: int,
    scale: float,
    measured: list[tuple[int, float]],
) -> None:
    """GridRates finds the same fastest grid for each number of stages as a full search, for any measured step times."""
    spec = elastic_job(9, microbatches)
    figures = figures_of(seconds, rate)
    model = GridRates(figures, spec, memory)
    grids = [grid for grid in bounded_grids(spec, len(seconds), workers) if model.fits(grid)]
    known = {grids[n]: took for n, took in measured if n < len(grids)}

    def rated(grid: Grid) -> tuple[float, int]:
        return known.get(grid, scale * model.seconds(grid)), grid.cells

    best = [min(map(rated, (g for g in grids if g.stages == p))) for p in {grid.stages for grid in grids}]
    found = GridRates(figures, spec, memory).ranked(workers, most, known, scale)
    assert [(one.seconds, one.grid.cells) for one in found] == sorted(best)[:most]
    for one in found:
        assert model.rate(one.grid, known, scale) == one


@pytest.mark.parametrize(
    ("topology", "elastic", "workers", "grids"),
    [
        ({"stages": 4}, {"minWorkers": 4, "maxWorkers": 12}, 13, [(4, 3), (4, 2), (4, 1)]),
        ({"stages": 4}, {"maxWorkers": 12}, 7, [(4, 1)]),
        ({"stages": 4}, {"maxWorkers": 12}, 3, []),
        ({"stages": 4}, {"minWorkers": 8, "maxWorkers": 12}, 8, [(4, 2), (4, 1)]),
        ({"stages": 4}, {"minWorkers": 8, "maxWorkers": 12}, 7, []),
        ({"stages": 4}, {"minWorkers": 7, "maxWorkers": 7}, 4, [(4, 1)]),
        ({"split": [1, 2, 3, 4]}, {"maxWorkers": 9}, 9, [(4, 2), (4, 1)]),
        ({"pipelines": 2}, {"maxWorkers": 6}, 9, [(1, 2), (2, 2), (3, 2)]),
        ({"pipelines": 2}, {"maxWorkers": 9, "minStages": 2}, 5, [(2, 2)]),
        ({"pipelines": 2}, {"maxWorkers": 9}, 1, []),
        ({}, {"maxWorkers": 4, "minStages": 2}, 4, [(2, 2), (2, 1), (3, 1), (4, 1)]),
    ],
)
def test_what_topology_fixes_stays_fixed_and_the_rest_is_chosen(
    topology: dict[str, Any], elastic: dict[str, int], workers: int, grids: list[tuple[int, int]]
) -> None:
    document = manifest(None, None, 8, elastic=elastic)
    document["spec"]["topology"] = topology | {"schedule": "1F1B"}
    spec = parse_manifest(document)
    found = list(bounded_grids(spec, 10, workers))
    assert found == [Grid(*grid) for grid in grids]
    assert all(is_within_bounds(spec, grid) for grid in found)


def test_of_grids_that_are_as_fast_the_one_with_fewer_workers_is_first() -> None:
    spec = elastic_job(7, 8, 1)
    assert list(bounded_grids(spec, 1, 7)) == [Grid(1, d) for d in (7, 4, 3, 2, 1)]
    rates = GridRates(profile(1).figures, spec)
    assert rates.best(7) == GridRate(Grid(1, 4), rates.seconds(Grid(1, 4)))


@pytest.mark.parametrize("mode", ["Auto", "Replicas", "None"])
def test_a_grid_whose_workers_lack_memory_is_none(mode: str) -> None:
    """`fits` demands memory for a lost stage except in mode None, and memory for replicas only of a single pipeline."""
    job = elastic_job(8, 8)
    spec = replace(job, redundancy=replace(job.redundancy, mode=RedundancyMode(mode)))
    figures = profile(8, NETWORK).figures

    def needed(grid: Grid) -> int:
        topology = replace(spec.topology, stages=grid.stages, pipelines=grid.pipelines, schedule=grid.schedule)
        one = replace(spec, topology=topology)
        with_copies = max(device_bytes(figures, one, taken_over=over) for over in (False, mode != "None"))
        if grid.pipelines == 1 or mode == "None":
            return with_copies
        bare = replace(one, redundancy=replace(one.redundancy, mode=RedundancyMode.NONE))
        return min(with_copies, max(device_bytes(figures, bare, taken_over=over) for over in (False, True)))

    memory = needed(Grid(4, 2))
    grids, rates = list(bounded_grids(spec, 8, 8)), GridRates(figures, spec, memory)
    found = {grid for grid in grids if rates.fits(grid)}
    assert found
    assert max(map(needed, found)) <= memory
    assert found < set(grids)
    assert {one.grid for one in rates.ranked(8, 9, {}, 1.0)} <= found
    assert not GridRates(figures, spec, 1).best(8)


@settings(max_examples=40)
@pytest.mark.parametrize("mode", ["Replicas", "None"])
@given(
    seconds=st.lists(st.floats(0.001, 1.0), min_size=4, max_size=6),
    workers=st.integers(1, 20),
    microbatches=st.integers(3, 20),
    rate=st.sampled_from([1e3, 1e5, 1e12]),
    devices=st.integers(1, 2),
    groups=st.integers(1, 20) | st.none(),
)
def test_a_step_is_that_of_a_whole_plan_to_the_last_digit(
    mode: str, seconds: list[float], workers: int, microbatches: int, rate: float, devices: int, groups: int | None
) -> None:
    """GridRates simulates one pipeline per number of microbatches; StepModel simulates all, with equal results."""
    spec = parse_manifest(
        manifest(None, None, microbatches, mode, elastic={"maxWorkers": 9}, worker={"devices": devices})
    )
    groups = None if groups is None else min(groups, microbatches)
    spec = replace(spec, training=replace(spec.training, gradient_groups=groups))
    layers = tuple(
        Layer(forward=one, backward=2 * one, update=one / 8, parameters=400, optimizer=800, gradients=400, boundary=100)
        for one in seconds
    )
    figures = ModelFigures(layers=layers, network=Network(flow=rate, machine=2 * rate, latency=0.001))
    rates, model = GridRates(figures, spec), StepModel(figures, spec)
    for grid in bounded_grids(spec, len(seconds), workers):
        ranges = rates.ranges(grid.stages)
        peers = [Peer(worker=f"w{i}", host="", port=0) for i in range(grid.cells)]
        plan = initial_plan(peers, ranges, grid.pipelines, spec.training, spec.redundancy, schedule=grid.schedule)
        plan = msgspec.structs.replace(plan, device_layers=device_layers(spec, ranges, figures.costs))
        assert rates.seconds(grid) == model.seconds(plan, plan.target)
        assert rates.least(grid) <= rates.seconds(grid)


def test_grids_share_a_split_only_if_their_workers_need_the_same_memory() -> None:
    """Grids share a split only if their longest pipelines run equally many microbatches. Of 30 microbatches in 20
    groups, each of 16 pipelines runs up to 3, and each of 20 up to 2. Without groups, each would run up to 2.
    """
    document = manifest(4, None, 30, elastic={"maxWorkers": 80})
    document["spec"]["training"]["gradientGroups"] = 20
    spec, sizes = parse_manifest(document), (9, 2, 5, 7, 3, 8)
    layers = tuple(
        Layer(
            forward=1.0,
            backward=2.0,
            parameters=size,
            optimizer=size,
            gradients=size,
            activations=100 * size,
            boundary=10,
        )
        for size in sizes
    )
    figures, grids, differ = ModelFigures(layers=layers, network=NETWORK), (Grid(4, 20), Grid(4, 16)), 0
    for memory in range(1000, 12_000, 100):
        together = GridRates(figures, spec, memory)
        alone = [GridRates(figures, spec, memory).split(grid) for grid in grids]
        assert [together.split(grid) for grid in grids] == alone, memory
        differ += alone[0] != alone[1]
    assert differ, "or nothing could be shared by mistake"
