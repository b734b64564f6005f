"""What a manifest is warned of."""

from typing import Any

import pytest

from bamboo.job.manifest import parse_manifest
from bamboo.job.manifest_warnings import warnings
from manifest_kit import bamboojob, training


def manifest(**redundancy: Any) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "a:b"}, training=training(1, 8, 1), topology={"stages": 4}, redundancy=redundancy
    )


@pytest.mark.parametrize(
    ("redundancy", "told"),
    [
        ({}, "ends if two neighbouring workers vanish at the same time; "),
        ({"replicas": 2}, "ends if three neighbouring workers vanish at the same time; "),
        ({"replicas": 2}, "with spec.redundancy.replicas: 3 another worker"),
        ({"replicas": 2, "mode": "None"}, "spec.redundancy.replicas 2 has no effect with spec.redundancy.mode None"),
    ],
)
def test_what_replicas_do_not_cover_is_warned_of(redundancy: dict[str, Any], told: str) -> None:
    assert any(told in warning for warning in warnings(parse_manifest(manifest(**redundancy))))


def test_more_replicas_than_there_are_others_is_a_warning() -> None:
    document = manifest(replicas=3)
    assert not any("replicas 3" in warning for warning in warnings(parse_manifest(document)))
    document["spec"]["topology"]["stages"] = 2
    (warning,) = (w for w in warnings(parse_manifest(document)) if "replicas 3" in w)
    assert warning == "spec.redundancy.replicas 3: a worker has only 1 other to hold its stage's state"
