"""Is a profile one of the job's model?"""

from typing import Any

import msgspec
import pytest

from bamboo.simulation.profile_match import doubt, mismatch, needs_layers, slowness, task_of
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import for_microbatch
from job_simulation_kit import manifest, profile

JOB = parse_manifest(manifest(2, 1, 6, task={"entrypoint": "mine:build", "config": {"width": 8, "list": [1, 2]}}))
OWN = msgspec.structs.replace(profile(3), task=task_of(JOB))


def changed(**fields: Any) -> Any:
    task = msgspec.structs.replace(task_of(JOB), **fields)
    return msgspec.structs.replace(OWN, task=task)


def test_a_jobs_own_profile_needs_no_question() -> None:
    again = msgspec.json.decode(msgspec.json.encode(OWN), type=type(OWN))
    assert not needs_layers(again, JOB)
    assert doubt("p", again, JOB) == ""


def test_another_number_of_layers_is_named_with_both() -> None:
    other = changed(entrypoint="other:build")
    assert needs_layers(other, JOB)
    assert mismatch("p", other, JOB, 3) == ""
    told = mismatch("p", other, JOB, 26)
    assert told.startswith("the profile p has 3 layers (field layers; of other:build with {")
    assert "and the job's model 26 (task.entrypoint mine:build with " in told


@pytest.mark.parametrize(
    ("fields", "asks", "told"),
    [
        ({"entrypoint": "other:build"}, True, "it is of other:build, and the job's task.entrypoint is mine:build"),
        ({"config": {"width": 9}}, True, 'it is of the config {"width": 9}, and the job\'s task.config is {"list": '),
        ({"precision": "bf16"}, False, "it was measured in bf16, and training.precision is fp32"),
        ({"boundary_precision": "bf16"}, False, "it was measured in bf16, and training.boundaryPrecision is fp32"),
    ],
)
def test_what_may_be_of_another_model_is_told(fields: dict[str, Any], asks: bool, told: str) -> None:
    other = changed(**fields)
    assert needs_layers(other, JOB) is asks
    said = doubt("p", other, JOB)
    assert told in said
    assert said.endswith("All figures are those of its 3 layers")
    assert "how many layers the job's model has is not known here (no torch)" in doubt("p", other, JOB, "no torch")


def test_a_profile_by_hand_is_believed_if_its_layers_are_as_many() -> None:
    plain = msgspec.structs.replace(OWN, task=None)
    assert needs_layers(plain, JOB)
    assert doubt("p", plain, JOB) == ""
    assert "it does not say of which task it is (field task)" in doubt("p", plain, JOB, "no torch")


def test_a_profile_that_is_far_slower_than_its_device_is_named_with_the_other_one() -> None:
    """Samples count: one of twice the microbatch may take twice as long."""
    quick = for_microbatch(OWN, OWN.samples * 4)
    assert slowness("p", OWN, quick) == ""
    slow = msgspec.structs.replace(OWN, samples=OWN.samples * 3)
    told = slowness("p", OWN, msgspec.structs.replace(slow, name="x@v100"))
    assert told.startswith("the layers of the profile p take what is left of a published step, 3.0 times as long as")
    assert "x@v100" in told
