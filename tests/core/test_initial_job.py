"""First values of another job: which checkpoint it is, and what is said where there is none."""

from typing import Any

import pytest

from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.initial_job import place_in, unresolved, with_place
from bamboo_core.job.manifest import parse_manifest
from manifest_kit import bamboojob, training

STORE = {"uri": "s3://bucket/before"}
CLAIM = {"persistentVolumeClaim": {"claimName": "kept"}}


def manifest(checkpoint: dict[str, Any] | None = None, **initial: Any) -> dict[str, Any]:
    task = {"entrypoint": "own:build", "initialFrom": {"job": "before", **initial}}
    more = {} if checkpoint is None else {"checkpoint": checkpoint}
    return bamboojob(task=task, training=training(4, 8, 2), topology={"stages": 2}, **more)


def before(checkpoint: dict[str, Any] | None, status: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {} if checkpoint is None else {"checkpoint": checkpoint}, "status": status}


DONE = {"checkpoint": {"lastStep": 200}}


@pytest.mark.parametrize(
    ("initial", "own", "other", "place"),
    [
        ({}, None, {"storage": STORE}, {"url": "s3://bucket/before", "step": 200}),
        ({"step": 100}, None, {"storage": STORE}, {"url": "s3://bucket/before", "step": 100}),
        (
            {},
            {"storage": CLAIM},
            {"storage": CLAIM},
            {"url": "file:///var/lib/bamboo/before/checkpoints", "step": 200},
        ),
    ],
)
def test_a_checkpoint_is_found_by_the_jobs_status(
    initial: dict[str, Any], own: dict[str, Any] | None, other: dict[str, Any], place: dict[str, Any]
) -> None:
    document = manifest(own, **initial)
    spec = parse_manifest(document)
    assert unresolved(spec) is not None
    assert place_in(spec, before(other, DONE)) == place
    found = parse_manifest(with_place(document, place))
    assert unresolved(found) is None
    assert found.task.initial_from is not None
    assert (found.task.initial_from.url, found.task.initial_from.step) == (place["url"], place["step"])
    assert numbers_digest(found) == numbers_digest(spec), "what the user wrote is the same"


@pytest.mark.parametrize(
    ("initial", "other", "status", "said"),
    [
        ({}, None, {}, "job: before keeps no checkpoints (spec.checkpoint)"),
        ({}, {"storage": STORE}, {}, "job: before has no checkpoint yet"),
        (
            {},
            {"storage": CLAIM},
            DONE,
            "in claim kept, which the workers of this job do not mount: expected it",
        ),
    ],
)
def test_a_job_without_a_usable_checkpoint_is_told(
    initial: dict[str, Any], other: dict[str, Any] | None, status: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=r"^spec\.task\.initialFrom\.") as refused:
        place_in(parse_manifest(manifest(**initial)), before(other, status))
    assert said in str(refused.value)


def test_a_job_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="there is no BambooJob before in this namespace"):
        place_in(parse_manifest(manifest()), None)


def test_first_values_somewhere_else_have_another_digest() -> None:
    here, there = (parse_manifest(manifest(url=f"/{place}", job=None)) for place in ("a", "b"))
    assert numbers_digest(here) != numbers_digest(there)
    assert numbers_digest(parse_manifest(manifest())) != numbers_digest(parse_manifest(manifest(job="other")))
