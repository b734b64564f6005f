"""The spec in force: the newest one or, while workers train, the accepted one with allowed edits; refusal events."""

from copy import deepcopy
from typing import Any

import pytest

from bamboo_core.coordinator.events import Emit
from bamboo_core.job.edits import task_digest
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import PlanRecord, read_status
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, JobGone
from bamboo_core.planning.plan import Plan
from bamboo_operator.jobs.effective_spec import AcceptedManifest, EffectiveSpec, merge_followed
from bamboo_operator.kube import attempts
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from manifest_kit import minimal
from replica_kit import planned

KEY = ("default", "tiny")
PLAN: Plan = planned(2, 1, 1, "a")
SETTINGS = WorkerPodSettings(coordinator_url="ws://operator/job", image="trainer:1")


def edited(**changes: Any) -> dict[str, Any]:
    """Return the minimal manifest with changed fields of its spec; a dict is merged into the field's current value."""
    document = deepcopy(minimal())
    document["metadata"] = {"name": "tiny", "namespace": "default"}
    for name, value in changes.items():
        there = document["spec"].get(name)
        document["spec"][name] = {**there, **value} if isinstance(there, dict) else value
    return document


class Revisions:
    """A fake API of a namespace's ControllerRevisions. failing: calls that raise; a failing "create" still stores."""

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {}
        self.failing: set[str] = set()

    async def list_revisions(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        uid = selector.partition("=")[2]
        return [r for r in self.there.values() if uid in r["metadata"]["labels"].values()]

    async def create_revision(self, revision: dict[str, Any]) -> None:
        if revision["metadata"]["name"] in self.there:
            raise ApiError(409, "AlreadyExists", "there")
        self.there[revision["metadata"]["name"]] = deepcopy(revision)
        if "create" in self.failing:
            raise ClusterUnreachable("late")

    async def delete_revision(self, namespace: str, name: str) -> None:
        if "delete" in self.failing:
            raise ClusterUnreachable("late")
        self.there.pop(name, None)


def body(document: dict[str, Any], generation: int = 1, **status: Any) -> dict[str, Any]:
    metadata = {"namespace": KEY[0], "name": KEY[1], "generation": generation, "uid": "u1"}
    return {"metadata": metadata, "spec": document["spec"], "status": status}


def trains(document: dict[str, Any]) -> str:
    """Return a status's plan record for a job whose workers train the task of this manifest."""
    rows = tuple(tuple(assignment.owner for assignment in row) for row in PLAN.pipelines)
    return PlanRecord(epoch=1, pipelines=rows, lost=frozenset(), task=task_digest(parse_manifest(document))).written()


class One:
    """A job's `EffectiveSpec` at a fake API server. refusals: the first dry runs' errors; later dry runs succeed."""

    def __init__(self, document: dict[str, Any], *refusals: Exception, plan: str = "", **more: Any) -> None:
        self.api: Any = Revisions()
        self.api.try_pod = self._try_pod
        self._refusals, self.tried = list(refusals), list[dict[str, Any]]()
        status = {**more, "plan": plan}
        self.plan = plan or None
        self.spec = EffectiveSpec(
            JobIdentity(KEY, "u1"), body(document, **status), read_status(status), self.api, ApiAttempts(KEY)
        )

    async def next(self) -> JobSpec | None:
        return await self.spec.next(self.plan, SETTINGS)

    async def _try_pod(self, pod: dict[str, Any]) -> None:
        self.tried.append(pod)
        if self._refusals:
            raise self._refusals.pop(0)

    @property
    def problems(self) -> tuple[str, ...]:
        return self.spec.problems

    def told(self) -> list[tuple[str, str]]:
        found: list[Emit] = []
        self.spec.report_problems(found.append)
        return [(one.reason, one.message) for one in found]


async def test_a_valid_job_runs_by_its_own_manifest_once_a_pod_of_it_may_be_made() -> None:
    one = One(edited())
    assert await one.next() == parse_manifest(edited())
    assert [pod["metadata"]["name"] for pod in one.tried] == ["tiny-w0-dry-run"]
    assert (one.problems, one.told()) == ((), [])
    assert one.spec.begin(resumed=False) == edited()


async def test_what_is_not_valid_is_told_once_and_the_spec_before_stays() -> None:
    one = One(edited())
    before = await one.next()
    one.spec.update(body(edited(training={"microBatchSize": 3}), 2))
    assert await one.next() is None
    assert one.spec.parsed() is None
    assert one.spec.spec == before
    ((reason, message),) = one.told()
    assert reason == "InvalidSpec"
    assert "spec.training" in message
    assert one.told() == []


@pytest.mark.parametrize(("status", "runs"), [(400, False), (422, False), (403, True), (409, True)])
async def test_only_a_pod_that_can_never_be_made_keeps_a_job_from_starting(status: int, runs: bool) -> None:
    one = One(edited(), ApiError(status, "x", "said of the pod"))
    assert (await one.next() is not None) == runs
    assert bool(one.problems) != runs
    assert runs or "said of the pod" in one.problems[0]


async def test_a_pod_of_each_pool_with_a_template_is_tried_and_its_refusal_names_the_pool() -> None:
    pools = [{"name": "a"}, {"name": "b", "template": {"spec": {"priority": "x"}}}, {"name": "c"}]
    document = edited(nodePools=pools)
    one = One(document)
    assert await one.next() == parse_manifest(document)
    assert [pod["metadata"]["labels"]["bamboo.dev/node-pool"] for pod in one.tried] == ["a", "b"]
    other = One(document)
    other.api.try_pod = _refuses_priority
    assert await other.next() is None
    assert other.problems == ("spec.nodePools[1].template: spec.priority: Invalid value",)


async def _refuses_priority(pod: dict[str, Any]) -> None:
    if "priority" in pod["spec"]:
        raise ApiError(422, "Invalid", "spec.priority: Invalid value")


async def test_a_dry_run_that_fails_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "FIRST_RETRY", 0.0)
    one = One(edited(), ClusterUnreachable("late"), ApiError(503, "ServiceUnavailable", "not now"))
    assert await one.next() is not None
    assert (len(one.tried), len(caplog.records)) == (3, 2)


async def test_without_its_namespace_a_job_is_gone() -> None:
    with pytest.raises(JobGone):
        await One(edited(), ApiError(404, "NotFound", "no such namespace")).next()


async def test_workers_go_on_with_what_was_accepted_whatever_the_manifest_says_by_now() -> None:
    """An operator that takes over after an edit of a fixed field keeps the accepted value, without a dry-run pod."""
    newest = edited(task={"config": {"a": 1}}, standby={"workers": 2})
    one = One(newest, plan=trains(edited()))
    earlier = AcceptedManifest(JobIdentity(KEY, "u1"), one.api)
    earlier.accept(edited(), 1)
    await earlier.save()
    spec = await one.next()
    assert spec is not None
    assert (spec.task.config, spec.standby.workers, one.tried) == ({}, 2, [])
    ((reason, message),) = one.told()
    assert reason == "ChangeRefused"
    assert "spec.task.config.a" in message
    manifest = one.spec.begin(resumed=True)
    assert parse_manifest(manifest).task.config == {}


async def test_what_another_operator_has_told_is_not_told_again() -> None:
    newest = edited(training={"microBatchSize": 3})
    first = One(newest)
    await first.next()
    ((_, message),) = first.told()
    condition = {"type": "Accepted", "status": "False", "message": message}
    second = One(newest, conditions=[condition])
    assert await second.next() is None
    assert second.problems
    assert second.told() == []


@pytest.mark.parametrize(("status", "asked"), [(403, 1), (404, 1), (500, 2)])
async def test_what_was_accepted_is_asked_for_until_the_server_answers_or_refuses(
    status: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "FIRST_RETRY", 0.0)
    one = One(edited(), plan=trains(edited()))
    calls = []

    async def list_revisions(namespace: str, selector: str) -> list[dict[str, Any]]:
        calls.append(selector)
        if len(calls) == 1:
            raise ApiError(status, "x", "")
        return []

    one.api.list_revisions = list_revisions
    assert await one.next() == parse_manifest(edited())
    assert len(calls) == asked


async def test_a_task_that_was_edited_in_between_is_not_trained_by_workers_that_began_another() -> None:
    """The operator knows only the digest of the task that the workers train, since their manifest was never stored."""
    one = One(edited(task={"config": {"a": 1}}), plan=trains(edited()))
    assert await one.next() is None
    assert "the task that the job began with" in one.problems[0]
    suspended = One(edited(task={"config": {"a": 1}}, suspend=True), plan=trains(edited()))
    spec = await suspended.next()
    assert spec is not None
    assert spec.suspend, "it may be suspended all the same"


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
    """maxWorkers suffices for the stages of the newest manifest, but not for the stages of the running job."""
    before, newest = edited(elastic={"maxWorkers": 4}), edited(topology={"stages": 1}, elastic={"maxWorkers": 1})
    parse_manifest(newest)
    accepted, found = merge_followed(before, newest)
    assert accepted == before
    assert "maxWorkers" in found.problems[0]


def test_what_changes_together_once_the_job_is_suspended_is_no_mistake_before() -> None:
    """A new number of GPUs needs a new `devices`, which is fixed while the job runs. The merge of old `devices` and new
    GPUs is invalid, but is not reported if the edit also suspends the job.
    """

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
    """The spec is stored as JSON text without characters that Go escapes, so that the API server never changes it."""
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
    """A manifest accepted before a suspension and an edit is not recalled, even if the new one was never written."""
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
