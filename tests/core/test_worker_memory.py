"""How much memory a simulated job's workers need."""

import msgspec

from bamboo_core.planning.profile import Machine
from bamboo_core.planning.steps.worker_memory import device_bytes, memory_warning
from job_simulation_kit import job

pytest_plugins = ["job_simulation_fixtures"]


def test_a_machine_that_is_too_small_is_told(files: tuple[str, str]) -> None:
    """Two layers a worker, with its replica: parameters, gradients twice (two pipelines) and what AdamW remembers."""
    one = job(3, 2)
    assert device_bytes(one.profile.figures, one.spec, taken_over=False) == 2 * 300 + 2 * 2 * 100
    assert device_bytes(one.profile.figures, one.spec, taken_over=True) == 3 * 300 + 2 * 3 * 100
    assert memory_warning(one.profile, one.spec) == ""
    small = msgspec.structs.replace(one.profile, machine=Machine(memory=1200))
    told = "a worker needs about 0.0 GB while it runs a lost neighbour's stage, too, and a machine of the profile has"
    assert memory_warning(small, one.spec).startswith(told)


def test_memory_is_counted_for_a_device() -> None:
    """One layer each, with its replica."""
    two = job(2, 1, devices=2)
    assert device_bytes(two.profile.figures, two.spec, taken_over=False) == 2 * 300 + 2 * 100
    small = msgspec.structs.replace(two.profile, machine=Machine(memory=100))
    assert memory_warning(small, two.spec).startswith("a device of a worker needs about 0.0 GB, and a machine")
