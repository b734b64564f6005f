"""How much memory a simulated job's workers need."""

from dataclasses import replace

import msgspec
import pytest

from bamboo_core.job.training_spec import ParameterPrecision, Precision
from bamboo_core.planning.profile import Machine
from bamboo_core.planning.steps.worker_memory import device_bytes, memory_warning
from job_simulation_kit import job


def test_a_machine_that_is_too_small_is_told() -> None:
    """Two stages' parameters and what AdamW remembers; a sum of gradients, and the replica's final one.

    While a worker runs two stages, what AdamW remembers of them is on the device for one, in its update.
    """
    one = job(3, 2)
    assert device_bytes(one.profile.figures, one.spec, taken_over=False) == 2 * 300 + 2 * 100
    assert device_bytes(one.profile.figures, one.spec, taken_over=True) == 3 * 300 - 200 + 2 * 100
    assert memory_warning(one.profile, one.spec) == ""
    small = msgspec.structs.replace(one.profile, machine=Machine(memory=850))
    told = "a worker needs about 0.0 GB while it runs a lost neighbour's stage, too, and a machine of the profile has"
    assert memory_warning(small, one.spec).startswith(told)


def test_memory_is_counted_for_a_device() -> None:
    """One layer each, with its replica."""
    two = job(2, 1, devices=2)
    assert device_bytes(two.profile.figures, two.spec, taken_over=False) == 2 * 300 + 2 * 100
    small = msgspec.structs.replace(two.profile, machine=Machine(memory=100))
    assert memory_warning(small, two.spec).startswith("a device of a worker needs about 0.0 GB, and a machine")


@pytest.mark.parametrize(
    ("training", "calm", "helping"),
    [({}, 300 + 100, 100 + 2 * 100), ({"maxGradientNorm": 1.0}, 300 + 2 * 100, 300 + 2 * 100)],
)
def test_a_worker_that_runs_a_stage_for_two_pipelines_has_its_state_once(
    training: dict[str, float], calm: int, helping: int
) -> None:
    """And a sum for each; in an update one final gradient, and a copy if that is clipped."""
    one = job(3, 2, redundancy={"mode": "None"})
    spec = replace(one.spec, training=replace(one.spec.training, max_gradient_norm=training.get("maxGradientNorm")))
    assert device_bytes(one.profile.figures, spec, taken_over=False) == calm
    assert device_bytes(one.profile.figures, spec, taken_over=True) == max(helping, 300 + 100)


def test_casts_of_parameters_count_while_products_are_in_half_precision() -> None:
    """And a layer's gradient that is cast back. A layer that keeps nothing has no casts, and its output is not kept."""
    one = job(2, 1, redundancy={"mode": "None"})
    spec = replace(one.spec, training=replace(one.spec.training, precision=Precision.BF16))
    assert device_bytes(one.profile.figures, spec, taken_over=False) == 300 + 100 + 100
    first, *others = one.profile.layers
    first = msgspec.structs.replace(first, activations=7)
    keeps = msgspec.structs.replace(one.profile.figures, layers=(first, *others))
    assert device_bytes(keeps, spec, taken_over=False) == 300 + 100 + 100 + 50 + 3 * 7
    spec = replace(spec, training=replace(spec.training, parameter_precision=ParameterPrecision.BF16))
    assert device_bytes(one.profile.figures, spec, taken_over=False) == 300 + 100 + 100
