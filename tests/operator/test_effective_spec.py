"""By which spec a job runs: the newest that is valid, or what its workers began with; and what the user hears of it."""

from typing import Any

import pytest

from accepted_manifest_kit import KEY, Revisions, edited
from bamboo_core.coordinator.events import Emit
from bamboo_core.job.api_object import written
from bamboo_core.job.edits import task_digest
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, RuntimeKind
from bamboo_core.job.status import JobRuntime, read_status
from bamboo_core.kube.errors import ApiError
from bamboo_core.planning.plan import Plan
from bamboo_operator.cluster.runtimes import RuntimeCache
from bamboo_operator.jobs import effective_spec as module
from bamboo_operator.jobs.accepted_manifest import AcceptedManifest, manifest_of
from bamboo_operator.jobs.effective_spec import EffectiveSpec
from bamboo_operator.kube import attempts
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.client import JobGone
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.status.plan_record import plan_record
from bamboo_operator.status.writer import StatusWriter
from replica_kit import planned

PLAN: Plan = planned(2, 1, 1, "a")
SETTINGS = WorkerPodSettings(coordinator_url="ws://operator/job", image="trainer:1")


def body(document: dict[str, Any], generation: int = 1, **status: Any) -> dict[str, Any]:
    metadata = {"namespace": KEY[0], "name": KEY[1], "generation": generation, "uid": "u1"}
    return {"metadata": metadata, "spec": document["spec"], "status": status}


def trains(document: dict[str, Any]) -> str:
    """The status' plan of a job whose workers train that."""
    return plan_record(PLAN, (), task_digest(parse_manifest(document)))


class One:
    """refusals: of a pod's dry run, in turn; then it is allowed."""

    def __init__(self, document: dict[str, Any], *refusals: Exception, plan: str = "", **more: Any) -> None:
        self.api: Any = Revisions()
        self.api.try_pod = self._try_pod
        self._refusals, self.tried = list(refusals), list[dict[str, Any]]()
        status = {**more, "plan": plan}
        self.status = StatusWriter(JobIdentity(KEY, "u1"), status, self.api)
        self.runtimes = RuntimeCache(self.api)
        self.spec = EffectiveSpec(
            JobIdentity(KEY, "u1"),
            body(document, **status),
            self.status,
            self.api,
            ApiAttempts(KEY),
            self.runtimes,
        )

    async def _try_pod(self, pod: dict[str, Any]) -> None:
        self.tried.append(pod)
        if self._refusals:
            raise self._refusals.pop(0)

    @property
    def problems(self) -> tuple[str, ...]:
        return self.status.facts.problems

    def told(self) -> list[tuple[str, str]]:
        found: list[Emit] = []
        self.spec.report_problems(found.append)
        return [(one.reason, one.message) for one in found]


async def test_a_valid_job_runs_by_its_own_manifest_once_a_pod_of_it_may_be_made() -> None:
    one = One(edited())
    assert await one.spec.next(SETTINGS) == parse_manifest(edited())
    assert [pod["metadata"]["name"] for pod in one.tried] == ["tiny-w0-dry-run"]
    assert (one.problems, one.told()) == ((), [])
    assert one.spec.begin(resumed=False) == edited()


async def test_what_is_not_valid_is_told_once_and_the_spec_before_stays() -> None:
    one = One(edited())
    before = await one.spec.next(SETTINGS)
    one.spec.update(body(edited(training={"microBatchSize": 3}), 2))
    assert await one.spec.next(SETTINGS) is None
    assert one.spec.parsed() is None
    assert one.status.facts.spec == before
    ((reason, message),) = one.told()
    assert reason == "InvalidSpec"
    assert "spec.training" in message
    assert one.told() == []


@pytest.mark.parametrize(("status", "runs"), [(400, False), (422, False), (403, True), (409, True)])
async def test_only_a_pod_that_can_never_be_made_keeps_a_job_from_starting(status: int, runs: bool) -> None:
    one = One(edited(), ApiError(status, "x", "said of the pod"))
    assert (await one.spec.next(SETTINGS) is not None) == runs
    assert bool(one.problems) != runs
    assert runs or "said of the pod" in one.problems[0]


async def test_a_pod_of_each_pool_with_a_template_is_tried_and_its_refusal_names_the_pool() -> None:
    pools = [{"name": "a"}, {"name": "b", "template": {"spec": {"priority": "x"}}}, {"name": "c"}]
    document = edited(nodePools=pools)
    one = One(document)
    assert await one.spec.next(SETTINGS) == parse_manifest(document)
    assert [pod["metadata"]["labels"]["bamboo.dev/node-pool"] for pod in one.tried] == ["a", "b"]
    other = One(document)
    other.api.try_pod = _refuses_priority
    assert await other.spec.next(SETTINGS) is None
    assert other.problems == ("spec.nodePools[1].template: spec.priority: Invalid value",)


async def _refuses_priority(pod: dict[str, Any]) -> None:
    if "priority" in pod["spec"]:
        raise ApiError(422, "Invalid", "spec.priority: Invalid value")


async def test_a_dry_run_that_fails_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    one = One(edited(), TimeoutError(), ApiError(500, "InternalError", "not now"))
    assert await one.spec.next(SETTINGS) is not None
    assert (len(one.tried), len(caplog.records)) == (3, 2)


async def test_without_its_namespace_a_job_is_gone() -> None:
    with pytest.raises(JobGone):
        await One(edited(), ApiError(404, "NotFound", "no such namespace")).spec.next(SETTINGS)


async def test_workers_go_on_with_what_was_accepted_whatever_the_manifest_says_by_now() -> None:
    """Another operator takes over after an edit of a fixed field; no pod is tried."""
    newest = edited(task={"config": {"a": 1}}, standby={"workers": 2})
    one = One(newest, plan=trains(edited()))
    earlier = AcceptedManifest(JobIdentity(KEY, "u1"), one.api)
    earlier.accept(edited(), 1)
    await earlier.save()
    spec = await one.spec.next(SETTINGS)
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
    await first.spec.next(SETTINGS)
    ((_, message),) = first.told()
    condition = {"type": "Accepted", "status": "False", "message": message}
    second = One(newest, conditions=[condition])
    assert await second.spec.next(SETTINGS) is None
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
    assert await one.spec.next(SETTINGS) == parse_manifest(edited())
    assert len(calls) == asked


async def test_a_task_that_was_edited_in_between_is_not_trained_by_workers_that_began_another() -> None:
    """What they began with is known by its digest only: the revision could not be written."""
    one = One(edited(task={"config": {"a": 1}}), plan=trains(edited()))
    assert await one.spec.next(SETTINGS) is None
    assert "the task that the job began with" in one.problems[0]
    suspended = One(edited(task={"config": {"a": 1}}, suspend=True), plan=trains(edited()))
    spec = await suspended.spec.next(SETTINGS)
    assert spec is not None
    assert spec.suspend, "it may be suspended all the same"


def with_first_values(**initial: Any) -> dict[str, Any]:
    return edited(task={"initialFrom": {"job": "before", **initial}})


def of_another(step: int) -> dict[str, Any]:
    spec = {"checkpoint": {"storage": {"uri": "s3://bucket/before"}}}
    return {"spec": spec, "status": {"checkpoint": {"lastStep": step}}}


async def test_first_values_of_another_job_are_found_once_and_stay_those() -> None:
    """A later checkpoint of that job is not for workers that come later, nor for another operator."""
    one, jobs = One(with_first_values()), dict[str, Any]()

    async def find_job(namespace: str, name: str) -> dict[str, Any] | None:
        assert (namespace, name) == ("default", "before")
        return jobs.get(name)

    one.api.find_job = find_job
    assert await one.spec.next(SETTINGS) is None
    assert one.problems == ("spec.task.initialFrom.job: there is no BambooJob before in this namespace",)
    jobs["before"] = of_another(20)
    expected = with_first_values(url="s3://bucket/before", step=20)
    assert await one.spec.next(SETTINGS) == parse_manifest(expected)
    assert one.problems == ()
    jobs["before"] = of_another(40)
    assert one.spec.begin(resumed=False) == expected
    await one.spec.accepted.save()

    second = One(with_first_values(), plan=trains(with_first_values()))
    second.api.there = one.api.there
    assert await second.spec.next(SETTINGS) == parse_manifest(expected)
    assert second.status.facts.refused == ""
    second.spec.update(body(edited(task={"initialFrom": {"job": "other"}}), 2))
    assert second.spec.follow() == parse_manifest(expected)
    assert "spec.task.initialFrom.job" in second.status.facts.refused


# With a runtime

PART = {"worker": {"image": "team:1"}, "checkpoint": {"storage": {"uri": "s3://bucket"}}, "queue": {"name": "team"}}


def spot(job: dict[str, Any], generation: int = 1, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "spot", "uid": f"r{generation}", "generation": generation}
    accepted = {"type": "Accepted", "status": "True", "observedGeneration": generation}
    status = {"observedGeneration": generation, "conditions": [accepted]}
    return {"metadata": metadata, "spec": {"job": job, **spec}, "status": status}


class WithRuntime(One):
    """A job that names the runtime spot."""

    def __init__(self, document: dict[str, Any], *, plan: str = "", **more: Any) -> None:
        super().__init__(edited(**{**document, "runtimeRef": {"name": "spot"}}), plan=plan, **more)

        async def write(*_: Any) -> None:
            return None

        self.api.write_runtime_status = write

    def show(self, job: dict[str, Any], generation: int = 1, **spec: Any) -> None:
        self.runtimes.event(RuntimeKind.CLUSTER, None, spot(job, generation, **spec))

    async def next(self) -> JobSpec:
        found = await self.spec.next(SETTINGS)
        assert found is not None, self.problems
        return found


async def test_a_job_waits_for_its_runtime_says_so_once_and_goes_on_when_it_is_there() -> None:
    one = WithRuntime({})
    assert await one.spec.next(SETTINGS) is None
    assert await one.spec.next(SETTINGS) is None
    assert one.told() == [("RuntimeNotFound", "spec.runtimeRef: there is no ClusterBambooRuntime spot yet")]
    assert one.told() == []
    one.show({"standby": {"workers": 1}})
    assert await one.spec.next(SETTINGS) is None
    assert one.problems == ("spec.runtimeRef: ClusterBambooRuntime spot is not valid: spec.job.standby: unknown field",)
    one.show(PART, 2)
    spec = await one.next()
    assert (spec.worker.image, spec.checkpoint and spec.checkpoint.storage.uri) == (
        "team:1",
        "s3://bucket/default/tiny",
    )
    assert one.tried[-1]["spec"]["containers"][0]["image"] == "team:1"
    assert (one.problems, one.status.facts.no_runtime, one.told()) == ((), "", [])
    assert one.status.facts.runtime is not None
    assert one.status.facts.runtime.generation == 2
    assert "runtimeRef" not in one.spec.begin(resumed=False)["spec"], "workers, also older ones, know no runtimes"


async def test_a_job_that_says_what_its_runtime_lets_no_job_say_does_not_run() -> None:
    one = WithRuntime({"worker": {"image": "mine:1"}})
    one.show(PART, overridable=[])
    assert await one.spec.next(SETTINGS) is None
    assert one.problems == ("spec.worker.image: ClusterBambooRuntime spot says it, of which jobs may override nothing",)


async def begun(**spec: Any) -> WithRuntime:
    """A job of which workers have begun to train with the first generation of its runtime."""
    one = WithRuntime({})
    one.show(PART, **spec)
    await one.next()
    plan = trains({"metadata": {"name": "tiny"}, **manifest_of(KEY, one.spec.begin(resumed=False)["spec"])})
    await one.spec.accepted.save()
    one.status.written = read_status({"plan": plan, "runtime": written(one.status.facts.runtime or JobRuntime())})
    assert one.spec.begun
    return one


CHANGED = {
    **PART,
    "worker": {"image": "team:2"},
    "checkpoint": {"storage": {"uri": "s3://other"}},
    "queue": {"name": "b"},
}


@pytest.mark.parametrize(("updates", "image"), [("NewJobs", "team:1"), ("Rollout", "team:2")])
async def test_a_change_of_a_runtime_reaches_workers_as_it_says_and_never_what_is_fixed(
    updates: str, image: str
) -> None:
    one = await begun(updates=updates)
    one.show(CHANGED, 2, updates=updates)
    spec = await one.next()
    assert spec.worker.image == image
    assert spec.checkpoint is not None
    assert spec.queue is not None
    assert (spec.checkpoint.storage.uri, spec.queue.name) == ("s3://bucket/default/tiny", "team")
    assert (one.problems, one.status.facts.refused, one.status.facts.warnings) == ((), "", ())
    assert one.status.facts.runtime is not None
    assert one.status.facts.runtime.generation == (2 if updates == "Rollout" else 1)
    one.spec.update(body(edited(runtimeRef={"name": "spot"}, standby={"workers": 2}), 2))
    assert (one.spec.follow().standby.workers, one.spec.follow().worker.image) == (2, image)


async def test_a_job_keeps_what_it_began_with_when_its_runtime_is_gone_also_with_another_operator() -> None:
    one = await begun()
    one.runtimes.event(RuntimeKind.CLUSTER, "DELETED", spot(PART))
    assert (await one.next()).worker.image == "team:1"
    assert one.status.facts.warnings == ("ClusterBambooRuntime spot is gone: the job keeps what it began with",)
    second = WithRuntime({"standby": {"workers": 2}}, plan=one.status.written.plan or "")
    second.api.there = one.api.there
    spec = await second.next()
    assert (spec.worker.image, spec.standby.workers) == ("team:1", 2)
    suspended = WithRuntime({}, runtime={"name": "spot"})
    suspended.api.there = one.api.there
    suspended.show(CHANGED, 2)
    again = await suspended.next()
    assert again.worker.image == "team:1", "what it began with counts also after it was suspended"
    over = WithRuntime({}, runtime={"name": "spot", "job": {"ttlSecondsAfterFinished": 7}})
    parsed = over.spec.parsed()
    assert parsed is not None
    assert parsed.ttl_seconds_after_finished == 7


async def test_a_later_runtime_does_not_shorten_how_long_a_job_stays_that_is_over() -> None:
    """Also for an operator that has not seen it train."""
    over = WithRuntime({}, runtime={"name": "spot", "job": {"ttlSecondsAfterFinished": 3600}})
    over.show({"ttlSecondsAfterFinished": 1}, 2)
    parsed = over.spec.parsed()
    assert parsed is not None
    assert parsed.ttl_seconds_after_finished == 3600


async def test_a_runtime_that_does_not_fit_a_job_that_trains_is_told_and_the_job_goes_on() -> None:
    one = await begun(updates="Rollout")
    one.show({**PART, "elastic": {"maxWorkers": 9}}, 2, updates="Rollout")
    spec = await one.next()
    assert spec.elastic.max_workers is None
    assert one.problems == ("spec.elastic.maxWorkers: expected only with an objective (of ClusterBambooRuntime spot)",)
    assert one.status.facts.runtime is not None
    assert one.status.facts.runtime.generation == 1, "that of the manifest that workers train by"
    one.show({**PART, "standby": {}}, 3)
    await one.next()
    assert one.problems == ()
    assert one.status.facts.warnings == (
        "ClusterBambooRuntime spot is not valid any more: the job keeps what it had of it before",
    )


async def test_another_runtime_cannot_be_named_while_workers_train() -> None:
    one = await begun()
    for ref, began in (({"name": "other"}, "ClusterBambooRuntime spot"), (None, "ClusterBambooRuntime spot")):
        document = edited(**({"runtimeRef": ref} if ref else {}), suspend=True)
        one.spec.update(body(document, 2))
        spec = one.spec.follow()
        assert one.problems == (f"spec.runtimeRef: cannot change; the job began with {began}",)
        assert (spec.worker.image, spec.suspend) == ("team:1", True)


async def test_a_suspended_job_does_not_look_for_first_values() -> None:
    one = One(edited(task={"initialFrom": {"job": "before"}}, suspend=True))
    spec = await one.spec.next(SETTINGS)
    assert spec is not None
    assert spec.task.initial_from is not None
    assert spec.task.initial_from.url is None


async def test_an_operator_that_may_not_list_jobs_says_so() -> None:
    one = One(with_first_values())

    async def find_job(namespace: str, name: str) -> None:
        raise ApiError(403, "Forbidden", "no right to list them")

    one.api.find_job = find_job
    assert await one.spec.next(SETTINGS) is None
    assert "no right to list them" in one.problems[0]
