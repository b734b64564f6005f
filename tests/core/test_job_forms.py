"""Fields of a manifest, as they are read."""

from typing import Any

from bamboo_core.job.manifest import parse_manifest
from manifest_kit import changed, minimal, problems


def test_zero_of_a_resource_is_kept() -> None:
    job = parse_manifest(changed({"spec.worker.resources.limits": {"nvidia.com/gpu": 0}}))
    assert job.worker.resources.limits == {"nvidia.com/gpu": 0}


def test_config_is_bounded_even_when_it_repeats_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    bomb: Any = 0
    for _ in range(12):
        bomb = [bomb] * 10
    document = minimal()
    document["spec"]["task"]["config"] = {"loop": loop, "bomb": bomb}
    first, second = problems(document)
    assert first.endswith(": nested too deeply, expected at most 16 levels")
    assert second.endswith(": too large, expected at most 10000 values")
