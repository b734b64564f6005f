"""The memory that workers need, and splits that fit into it."""

from dataclasses import replace
from itertools import combinations, pairwise
from time import process_time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.training_spec import ParameterPrecision, Precision
from bamboo_core.planning.grid import layer_ranges
from bamboo_core.planning.profile import Layer, Machine, ModelFigures
from bamboo_core.planning.splits.speeds import Ranges
from bamboo_core.planning.steps.worker_memory import device_bytes, fitting_split, memory_warning, most_bytes
from job_simulation_kit import NETWORK, job, manifest


def test_a_machine_that_is_too_small_is_told() -> None:
    """`memory_warning` warns of a machine that cannot hold a lost neighbour's stage, too.

    A worker has the parameters and AdamW's state of two stages, a sum of gradients and the replica's final gradient.
    While it runs two stages, the device has AdamW's state of the replica and of the stage that it updates.
    """
    one = job(3, 2)
    assert device_bytes(one.profile.figures, one.spec, taken_over=False) == 2 * 300 + 2 * 100
    assert device_bytes(one.profile.figures, one.spec, taken_over=True) == 3 * 300 - 200 + 2 * 100
    assert memory_warning(one.profile, one.spec) == ""
    small = msgspec.structs.replace(one.profile, machine=Machine(memory=850))
    message = (
        "a worker needs about 0.0 GB while it runs a lost neighbour's stage, too, and a machine of the profile has"
    )
    assert memory_warning(small, one.spec).startswith(message)


def test_memory_is_counted_for_a_device() -> None:
    """The memory of a device counts, not that of a worker: each device has one layer, and a replica of another."""
    two = job(2, 1, devices=2)
    assert device_bytes(two.profile.figures, two.spec, taken_over=False) == 2 * 300 + 2 * 100
    small = msgspec.structs.replace(two.profile, machine=Machine(memory=100))
    assert memory_warning(small, two.spec).startswith("a device of a worker needs about 0.0 GB, and a machine")


@pytest.mark.parametrize(("norm", "expected"), [(None, 300 + 100), (1.0, 300 + 2 * 100)])
def test_a_worker_that_runs_a_stage_for_two_pipelines_has_its_state_once(norm: float | None, expected: int) -> None:
    """Memory peaks in the update: one state and one final gradient, with a copy if gradients are clipped."""
    one = job(3, 2, redundancy={"mode": "None"})
    spec = replace(one.spec, training=replace(one.spec.training, max_gradient_norm=norm))
    assert [device_bytes(one.profile.figures, spec, taken_over=over) for over in (False, True)] == [expected] * 2


def test_casts_of_parameters_count_while_products_are_in_half_precision() -> None:
    """Memory includes casts of parameters to half precision and of their gradients back. A layer without activations
    keeps no cast parameters and no output.
    """
    one = job(2, 1, redundancy={"mode": "None"})
    spec = replace(one.spec, training=replace(one.spec.training, precision=Precision.BF16))
    assert device_bytes(one.profile.figures, spec, taken_over=False) == 300 + 100 + 100
    first, *others = one.profile.layers
    first = msgspec.structs.replace(first, activations=7)
    keeps = msgspec.structs.replace(one.profile.figures, layers=(first, *others))
    assert device_bytes(keeps, spec, taken_over=False) == 300 + 100 + 100 + 50 + 3 * 7
    spec = replace(spec, training=replace(spec.training, parameter_precision=ParameterPrecision.BF16))
    assert device_bytes(one.profile.figures, spec, taken_over=False) == 300 + 100 + 100


def fitted_job(stages: int, mode: str, schedule: str = "1F1B") -> JobSpec:
    document = manifest(stages, 1, 8)
    document["spec"]["redundancy"] = {"mode": mode}
    document["spec"]["topology"] |= {"schedule": schedule}
    return parse_manifest(document)


def figures(layers: list[tuple[float, int, int]]) -> ModelFigures:
    """Return a model's figures. layers: seconds, bytes of parameters, and bytes of activations of each."""
    made = tuple(
        Layer(
            forward=seconds / 3,
            backward=2 * seconds / 3,
            parameters=state,
            optimizer=2 * state,
            gradients=state,
            activations=kept,
            boundary=1,
        )
        for seconds, state, kept in layers
    )
    return ModelFigures(layers=made, network=NETWORK)


def all_splits(layers: int, stages: int) -> list[Ranges]:
    return [tuple(pairwise((0, *inner, layers))) for inner in combinations(range(1, layers), stages - 1)]


def longest(model: ModelFigures, split: Ranges) -> float:
    return max(sum(model.costs[first:end]) for first, end in split)


def test_the_usual_split_is_taken_where_it_fits() -> None:
    model, spec = figures([(1.0, 100, 10)] * 8), fitted_job(4, "Replicas")
    usual = layer_ranges(model.costs, spec.topology)
    assert fitting_split(model, spec, most_bytes(model, spec, usual)) == usual


@given(
    layers=st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 50), st.integers(0, 20)), min_size=4, max_size=8),
    stages=st.integers(2, 4),
    mode=st.sampled_from(["None", "Replicas"]),
    schedule=st.sampled_from(["1F1B", "ZBH1"]),
    share=st.floats(0.0, 1.0),
)
def test_it_fits_and_is_about_as_fast_as_the_fastest_that_does(
    layers: list[tuple[float, int, int]], stages: int, mode: str, schedule: str, share: float
) -> None:
    """`fitting_split` may miss a split that just fits, but none that leaves a quarter of each worker's memory free."""
    model, spec = figures(layers), fitted_job(stages, mode, schedule)
    bytes_of = {split: most_bytes(model, spec, split) for split in all_splits(len(layers), stages)}
    least, most = min(bytes_of.values()), max(bytes_of.values())
    memory = int(least + share * (most - least))
    found = fitting_split(model, spec, memory)
    easy = [longest(model, split) for split, needed in bytes_of.items() if needed <= 0.75 * memory]
    if found is not None:
        assert bytes_of[found] <= memory
    if easy:
        assert found is not None
        assert longest(model, found) <= 1.0001 * min(easy)


def test_thousands_of_layers_are_split_at_once() -> None:
    model = figures([(0.1 + number % 7, 50 + 1000 * (number < 40), 10) for number in range(3000)])
    spec = fitted_job(64, "Replicas")
    memory = int(0.8 * most_bytes(model, spec, layer_ranges(model.costs, spec.topology)))
    began = process_time()
    found = fitting_split(model, spec, memory)
    assert process_time() - began < 3
    assert found is not None
    assert (found[0][0], found[-1][1], len(found)) == (0, 3000, 64)


def test_groups_of_gradients_count_as_the_longest_share_of_them() -> None:
    """Memory follows the pipeline with the most microbatches: of 11 in three groups, two pipelines run 7 and 4, so the
    first stages keep as many in flight as with 14 microbatches.
    """

    def split(microbatches: int, memory: int, **training: int) -> Ranges | None:
        document = manifest(8, 2, microbatches)
        document["spec"]["training"] |= training
        return fitting_split(figures([(1.0, 10, 100)] * 24), parse_manifest(document), memory)

    memories = range(4000, 9000, 250)
    grouped = [split(11, memory, gradientGroups=3) for memory in memories]
    assert grouped == [split(14, memory) for memory in memories]
    assert grouped != [split(11, memory) for memory in memories]
