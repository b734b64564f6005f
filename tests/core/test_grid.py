"""Initial assignments: the layers of each stage, and the stages that a worker owns and keeps."""

import itertools
import re
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import TopologySpec
from bamboo_core.planning.grid import Roles, layer_ranges, split_layers, worker_roles
from manifest_kit import minimal


@pytest.mark.parametrize(
    ("topology", "devices", "message"),
    [
        (
            TopologySpec(stages=10, pipelines=1),
            1,
            "spec.topology.stages: expected at most the model's 4 layers, got 10",
        ),
        (
            TopologySpec(stages=10, pipelines=1, chooses_stages=True),
            1,
            "spec.elastic.minStages: expected at most the model's 4 layers, got 10",
        ),
        (
            TopologySpec(stages=3, pipelines=1, chooses_stages=True),
            2,
            "spec.elastic.minStages: expected with spec.worker.devices (2) at most the model's 4 layers, "
            "got 6 (3 times 2)",
        ),
        (
            TopologySpec(stages=1, pipelines=1, chooses_stages=True),
            5,
            "spec.worker.devices: expected at most the model's 4 layers, got 5",
        ),
    ],
)
def test_more_layers_than_there_are_is_a_problem_of_the_field_that_asks_for_them(
    topology: TopologySpec, devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer_ranges([1.0] * 4, topology, devices=devices)


def test_a_split_that_the_manifest_gives_is_kept_whatever_the_layers_cost() -> None:
    topology = TopologySpec(stages=3, split=(1, 4, 2))
    assert layer_ranges([9.0] * 5 + [1.0] * 2, topology) == ((0, 1), (1, 5), (5, 7))
    assert layer_ranges([1.0] * 6, TopologySpec(stages=3)) == ((0, 2), (2, 4), (4, 6))
    message = r"spec.topology.split: expected numbers that add up to the model's 8 layers, got 7 \(1, 4, 2\)"
    with pytest.raises(ValueError, match=message):
        layer_ranges([1.0] * 8, topology)


def by_definition(costs: list[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Search all cuts for the split whose longest stage is shortest; among equal splits, take the earliest last cut."""
    total = [0.0, *itertools.accumulate(costs)]
    best = {(0, 0): 0.0}
    cut: dict[tuple[int, int], int] = {}
    for stage, end in itertools.product(range(1, stages + 1), range(1, len(costs) + 1)):
        worst = {a: max(best[stage - 1, a], total[end] - total[a]) for a in range(end) if (stage - 1, a) in best}
        if worst:
            cut[stage, end] = min(worst, key=lambda a, worst=worst: (worst[a], a))
            best[stage, end] = worst[cut[stage, end]]
    bounds = [len(costs)]
    for stage in range(stages, 0, -1):
        bounds.append(cut[stage, bounds[-1]])
    return tuple(itertools.pairwise(reversed(bounds)))


COSTS = st.one_of(st.floats(0, 1e24), st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 1.0, 5e-324, 1e-9, 1e24]))


@given(st.lists(COSTS, min_size=1, max_size=14), st.integers(1, 14))
@settings(max_examples=500)
def test_the_split_is_the_one_of_the_definition_to_the_last_cut(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))
    assert split_layers(costs, stages) == by_definition(costs, stages)


@pytest.mark.parametrize("kind", ["equal", "random", "steep", "nothing"])
def test_a_model_of_ten_thousand_layers_is_split_at_once(kind: str) -> None:
    """A split of 10,000 layers takes less than 0.5 s: it blocks the event loop that all jobs of an operator share."""
    random = Random(0)
    cost = {"equal": lambda: 1.0, "random": random.random, "nothing": lambda: 0.0}
    steep = [10.0 ** random.randint(-300, 20) for _ in range(10_000)]
    costs = steep if kind == "steep" else [cost[kind]() for _ in range(10_000)]
    begun = time.process_time()
    split = split_layers(costs, 64)
    assert time.process_time() - begun < 0.5
    assert [a for a, _ in split] == [0, *(b for _, b in split[:-1])]
    assert split[-1][1] == 10_000
    assert all(a < b for a, b in split)


def test_a_worker_keeps_the_next_stage_and_runs_a_lost_one() -> None:
    document = minimal()
    document["spec"]["topology"] = {"stages": 3}
    spec = parse_manifest(document)
    calm, taken = (worker_roles(spec, 3, taken_over=over) for over in (False, True))
    assert calm[0] == Roles(stage=0, owned=(0,), kept=(1,))
    assert taken[2] == Roles(stage=2, owned=(2, 0), kept=(1,), taken_over=(0,))
    assert len(calm) == 3
