"""By what a job's workers train when its manifest was edited, and how another operator knows it."""

from typing import Any

import pytest

from accepted_manifest_kit import KEY, Revisions, edited
from bamboo_core.job.edits import task_digest
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_operator.jobs.accepted_manifest import AcceptedManifest, merge_followed
from bamboo_operator.kube.objects import JobIdentity


def test_what_may_change_is_followed_and_the_rest_is_named() -> None:
    accepted, found = merge_followed(edited(), edited(standby={"workers": 2}, task={"config": {"a": 1}}))
    assert found.spec.standby.workers == 2
    assert found.spec.task.config == {}
    assert found.problems == ()
    assert found.refused.startswith("spec.task.config.a: is fixed while the job runs")
    assert parse_manifest(accepted) == found.spec
    again, found = merge_followed(accepted, edited(standby={"workers": 2}))
    assert (again, found.refused) == (accepted, "")


def test_of_a_manifest_that_is_not_valid_nothing_is_followed_but_a_suspension() -> None:
    before = edited(standby={"workers": 1})
    wrong = edited(standby={"workers": 2}, training={"microBatchSize": 3})
    accepted, found = merge_followed(before, wrong)
    assert accepted == before
    assert found.spec == parse_manifest(before)
    assert "spec.training" in found.problems[0]
    _, found = merge_followed(before, edited(suspend=True, training={"microBatchSize": 3}))
    assert found.spec.suspend


def test_what_is_valid_only_with_another_grid_is_not_followed() -> None:
    """The most workers are enough for the stages of the newest manifest, and not for those of the job."""
    before, newest = edited(elastic={"maxWorkers": 4}), edited(topology={"stages": 1}, elastic={"maxWorkers": 1})
    parse_manifest(newest)
    accepted, found = merge_followed(before, newest)
    assert accepted == before
    assert "maxWorkers" in found.problems[0]


def test_what_changes_together_once_the_job_is_suspended_is_no_mistake_before() -> None:
    """Devices are fixed until then, and the number of GPUs is not: the one with the other would not be valid."""

    def with_gpus(count: int, suspend: bool) -> dict[str, Any]:
        worker = {"devices": count, "resources": {"limits": {"nvidia.com/gpu": count}}}
        return edited(suspend=suspend, worker=worker)

    before = with_gpus(2, suspend=False)
    accepted, found = merge_followed(before, with_gpus(4, suspend=True))
    assert (accepted, found.problems, found.refused) == (before, (), "")
    assert (found.spec.worker.devices, found.spec.suspend) == (2, True)
    _, found = merge_followed(before, with_gpus(4, suspend=False))
    assert "the number of GPUs in spec.worker.resources, got 2" in found.problems[0]


TASK = task_digest(parse_manifest(edited()))


async def test_another_operator_recalls_what_was_accepted_last() -> None:
    api: Any = Revisions()
    first = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    assert first.saved
    for generation, document in enumerate((edited(), edited(standby={"workers": 1}), edited()), 1):
        first.accept(document, generation)
        assert not first.saved
        await first.save()
        assert first.saved
        assert len(api.there) == 1
        second = AcceptedManifest(JobIdentity(KEY, "u1"), api)
        await second.load(TASK)
        assert second.manifest == document
        assert second.saved
    other = AcceptedManifest(JobIdentity(KEY, "u2"), api)
    await other.load(TASK)
    assert other.manifest is None, "of a job that had the name before"


async def test_the_api_server_has_no_other_form_for_what_is_kept() -> None:
    """It compares the bytes of an immutable text, and writes keys, floats and some characters as Go does."""
    api: Any = Revisions()
    first = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    config = {"z": 1e-7, "a": [1.0, 1e16], "text": '<é> & "\u2028\\\x7f\n'}
    first.accept(edited(task={"config": config}), 1)
    await first.save()
    (revision,) = api.there.values()
    (text,) = revision["data"].values()
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set("<>&"), "which Go escapes"
    second = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    await second.load(None)
    assert second.manifest == first.manifest


@pytest.mark.parametrize("failing", ["create", "delete"])
async def test_whatever_fails_the_newest_is_recalled(failing: str) -> None:
    api: Any = Revisions()
    first = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    first.accept(edited(), 1)
    await first.save()
    first.accept(edited(standby={"workers": 1}), 2)
    api.failing = {failing}
    with pytest.raises(ClusterUnreachable):
        await first.save()
    second = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    await second.load(TASK)
    assert second.manifest == edited(standby={"workers": 1})
    api.failing = set()
    for operator in (first, second):
        await operator.save()
        assert operator.saved
        assert len(api.there) == 1


async def test_what_was_accepted_of_an_earlier_training_is_not_recalled() -> None:
    """The job was suspended, its task edited, and resumed; what its workers train by then could not be written."""
    api: Any = Revisions()
    first = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    first.accept(edited(), 1)
    await first.save()
    newer = edited(task={"config": {"a": 1}})
    second = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    await second.load(task_digest(parse_manifest(newer)))
    assert second.manifest is None
    second.accept(newer, 2)
    await second.save()
    assert second.saved
    assert len(api.there) == 1
    unknown = AcceptedManifest(JobIdentity(KEY, "u1"), api)
    await unknown.load(None)
    assert unknown.manifest == newer, "as with a plan that an older version wrote"
