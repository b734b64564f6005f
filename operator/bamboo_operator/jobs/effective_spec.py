"""The spec that a job runs by: the user's newest one, unless it is invalid or its workers train by another one."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bamboo_core.coordinator.events import Emit
from bamboo_core.job.edits import task_digest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.manifest_warnings import warnings as manifest_warnings
from bamboo_core.job.pod_fields import PATH, pool_path
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, JobGone, RemoteError
from bamboo_operator.jobs.accepted_manifest import (
    AcceptedManifest,
    FollowedSpec,
    manifest_of,
    merge_followed,
    problems_of,
    refusal_in,
)
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.kube.refusals import PodRefused
from bamboo_operator.manifests.unknown_fields import outside_the_spec, refusal
from bamboo_operator.manifests.worker_pod import (
    WorkerPodSettings,
    template_problems,
    worker_pod,
)
from bamboo_operator.status.plan_record import task_digest_in

RETRY_SECONDS = 2.0  # between dry runs of a pod


class EffectiveSpec:
    """The spec in force, with its problems, which stay until the manifest is checked again.

    body: the BambooJob. written: its status. spec: the spec in force; None if there never was a valid one. generation:
    of the newest manifest. problems: its errors. refused: its changes that a running job does not follow. warnings: its
    fields without effect. surprises: settings that may not be intended.
    """

    def __init__(
        self,
        job: JobIdentity,
        body: Mapping[str, Any],
        written: BambooJobStatus,
        api: KubeApi,
        attempts: ApiAttempts,
    ) -> None:
        self._body, self._api, self._attempts = body, api, attempts
        self._key, self._uid = job
        self.accepted = AcceptedManifest(job, api)
        self._reported = refusal_in(written)
        self.spec: JobSpec | None = None
        self.generation, self.refused = 0, ""
        self.problems: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.surprises: tuple[str, ...] = ()

    def update(self, body: Mapping[str, Any]) -> None:
        """Take the newest BambooJob."""
        self._body = body

    def report_problems(self, record: Callable[[Emit], None]) -> None:
        """Record the newest manifest's problems as an event; once, even across operators."""
        message = "; ".join(self.problems) or self.refused
        if message and message != self._reported:
            record(Emit("InvalidSpec" if self.problems else "ChangeRefused", message, True))
        self._reported = message

    def begin(self, *, resumed: bool) -> dict[str, Any]:
        """Return the manifest for the workers: the newest, unless they have begun with another one."""
        if not resumed or self.accepted.manifest is None:
            self.accepted.accept(self._manifest(), self._newest)
        return dict(self.accepted.manifest or {})

    async def next(self, plan: str | None, settings: WorkerPodSettings) -> JobSpec | None:
        """Return the spec by which the job runs from now on; None if it cannot run, for the noted problems.

        plan: the plan record in the status, if workers train, perhaps since an earlier operator.
        """
        self.warnings, self.refused = (), ""
        if plan is not None and self.accepted.manifest is None:
            await self._load_accepted(plan)
        if plan is not None and self.accepted.manifest is not None:
            return self.follow()
        if (spec := self.read()) is None:
            return None
        self.warnings = tuple(template_problems(spec))
        self.problems = await self._dry_run(spec, settings) if plan is None else _changed_task(plan, spec)
        return None if self.problems else spec

    async def _load_accepted(self, plan: str) -> None:
        """Load the manifest by which the workers train, whatever the newest one says."""
        what = "read the manifest that the job's workers run with"
        act = partial(self.accepted.load, task_digest_in(plan))
        if refused := await self._attempts.until_done(what, act, ends=(403, 404)):  # a later call tries again
            self._attempts.log_failure(what, refused)

    def follow(self) -> JobSpec:
        """Accept the edits that running workers can follow, and return the resulting spec."""
        accepted = self.accepted.manifest or self._manifest()
        merged, followed = merge_followed(accepted, self._manifest())
        if unseen := outside_the_spec(followed.spec):
            kept = replace(parse_manifest(accepted), suspend=followed.spec.suspend)
            merged, followed = accepted, FollowedSpec(spec=kept, problems=unseen)
        self.accepted.accept(merged, self._newest)
        self.generation, self.problems, self.refused = self._newest, followed.problems, followed.refused
        self.spec, self.surprises = followed.spec, tuple(manifest_warnings(followed.spec))
        self.warnings = tuple(template_problems(followed.spec))
        return followed.spec

    def read(self) -> JobSpec | None:
        """Return the newest spec; None if it is invalid, in which case the earlier one stays in force."""
        self.generation, self.problems = self._newest, ()
        try:
            spec = parse_manifest(self._manifest())
        except ManifestError as error:
            self.problems = problems_of(error)
            return None
        self.spec, self.surprises = spec, tuple(manifest_warnings(spec))
        return spec

    @property
    def _newest(self) -> int:
        """Return the generation of the newest manifest."""
        return int(self._body["metadata"].get("generation") or 0)

    async def _dry_run(self, spec: JobSpec, settings: WorkerPodSettings) -> tuple[str, ...]:
        """Return the API server's objections to this job's pods."""
        if unseen := outside_the_spec(spec):
            return unseen
        pool = replace(spec.node_pools[0], template={}) if spec.node_pools else None
        problems = await self._dry_run_of(worker_pod(spec, self._uid, 0, pool, settings), spec.worker.template, PATH)
        for index, one in enumerate(spec.node_pools):
            if one.template and not problems:
                pod = worker_pod(spec, self._uid, 0, one, settings)
                problems = await self._dry_run_of(pod, one.template, pool_path(index))
        return problems

    async def _dry_run_of(self, pod: dict[str, Any], template: Mapping[str, Any], path: str) -> tuple[str, ...]:
        """Return its objections to a pod made of this template, whose other parts are valid."""
        pod["metadata"]["name"] = f"{pod['metadata']['name'][:50].rstrip('-')}-dry-run"
        while True:
            self._attempts.heartbeat()
            try:
                await self._api.try_pod(pod)
            except ApiError as error:
                if error.status == 404:
                    raise JobGone(str(error)) from None  # the namespace is gone, too
                if error.status in (400, 422):
                    return refusal(template, str(error), path)
                if error.status == 409 or PodRefused.of(error):  # such as a quota: reported when it matters
                    return ()
                self._attempts.log_failure("check the pod template", error)
            except RemoteError as error:
                self._attempts.log_failure("check the pod template", error)
            else:
                self._attempts.succeeded("check the pod template")
                return ()
            await asyncio.sleep(RETRY_SECONDS)

    def _manifest(self) -> dict[str, Any]:
        return manifest_of(self._key, self._body.get("spec") or {})

    def parsed(self) -> JobSpec | None:
        """Return the newest spec even if it is not followed; None if it is invalid."""
        try:
            return parse_manifest(self._manifest())
        except ManifestError:
            return None


def _changed_task(plan: str, spec: JobSpec) -> tuple[str, ...]:
    """Return the problem of a changed task after the job has begun, unless the job is to be suspended."""
    began = task_digest_in(plan)
    if spec.suspend or began is None or began == task_digest(spec):
        return ()
    return ("spec.task: expected the task that the job began with; it was changed while the workers were training",)
