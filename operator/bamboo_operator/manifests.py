"""Which spec a job runs by: what the user wrote, if it is valid, and if its workers began with nothing else."""

import asyncio
from collections.abc import Mapping
from typing import Any

from bamboo.job.edits import task_digest
from bamboo.job.manifest import ManifestError, parse_manifest
from bamboo.job.spec import JobSpec
from bamboo_operator.accepted import Accepted, follow, manifest_of, problems_of
from bamboo_operator.api import API_ERRORS, Api, ApiError, JobGone
from bamboo_operator.brain import known_task
from bamboo_operator.doors import JobKey
from bamboo_operator.misspelt import outside_the_spec, refusal
from bamboo_operator.pods import JobMeta, OperatorSettings, template_problems, unkept, worker_pod
from bamboo_operator.removal import FIRST_RETRY, LAST_RETRY, Removal
from bamboo_operator.telling import Telling

TRY_SECONDS = 2.0  # until a pod is tried again


class Manifests:
    """body: the BambooJob, to be kept up to date. What is found wrong with it is noted for the status."""

    def __init__(self, uid: str, body: Mapping[str, Any], telling: Telling, api: Api, removal: Removal) -> None:
        self.body, self._telling, self._api, self._removal = body, telling, api, removal
        metadata = body["metadata"]
        self._key: JobKey = (metadata["namespace"], metadata["name"])
        self._meta = JobMeta(uid=uid)
        self.accepted = Accepted(self._key, uid)

    @property
    def _begun(self) -> bool:
        """Are there workers that train, perhaps left by another operator?"""
        return self._telling.plan is not None

    def begin(self, *, resumed: bool) -> dict[str, Any]:
        """The manifest by which workers train from now on; the newest, unless they have begun before."""
        if not resumed or self.accepted.manifest is None:
            self.accepted.accept(self._manifest(), self._generation)
        return dict(self.accepted.manifest or {})

    async def next_spec(self, settings: OperatorSettings) -> JobSpec | None:
        """By which the job runs from now on; None if it can't be run, which the status then says."""
        self._telling.note(warnings=(), refused="")
        if self._begun and self.accepted.manifest is None:
            await self._recall()
        if self._begun and self.accepted.manifest is not None:
            return self.follow()
        if (spec := self._read()) is None:
            return None
        self._telling.note(warnings=(*template_problems(spec), *unkept(spec)))
        if problems := self._changed_task(spec) if self._begun else await self._refused(spec, settings):
            self._telling.note(problems=problems)
            return None
        return spec

    async def _recall(self) -> None:
        """What the workers train by, whatever the manifest says by now."""
        pause = FIRST_RETRY
        while True:
            self._removal.beat()
            try:
                await self.accepted.recall(self._api, known_task(self._telling.plan))
            except API_ERRORS as error:
                self._removal.complain("read the manifest that the job's workers run with", error)
                if isinstance(error, ApiError) and error.status in (403, 404):  # not allowed to: tried again later
                    return
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY)

    def follow(self) -> JobSpec:
        """What of the newest manifest workers follow that train by the accepted one; what they do not is told."""
        merged, found = follow(self.accepted.manifest or self._manifest(), self._manifest())
        self.accepted.accept(merged, self._generation)
        warnings = (*template_problems(found.spec), *unkept(found.spec))
        self._telling.note(
            generation=self._generation, spec=found.spec, problems=found.problems, refused=found.refused,
            warnings=warnings,
        )  # fmt: skip
        return found.spec

    def _changed_task(self, spec: JobSpec) -> tuple[str, ...]:
        """What is wrong with the task of a job that has begun, and that is not to be suspended."""
        began = known_task(self._telling.plan)
        if spec.suspend or began is None or began == task_digest(spec):
            return ()
        return ("spec.task: expected the task that the job began with; it was changed while the workers were training",)

    def _read(self) -> JobSpec | None:
        """The newest spec; None if it is not valid: then the one before stays, and the facts say what is wrong."""
        try:
            spec = parse_manifest(self._manifest())
        except ManifestError as error:
            self._telling.note(generation=self._generation, problems=problems_of(error))
            return None
        self._telling.note(generation=self._generation, spec=spec, problems=())
        return spec

    @property
    def _generation(self) -> int:
        return int(self.body["metadata"].get("generation") or 0)

    async def _refused(self, spec: JobSpec, settings: OperatorSettings) -> tuple[str, ...]:
        """What the API server has against the pods of this job."""
        template = spec.worker.template
        if unseen := outside_the_spec(template):
            return unseen
        pool = spec.node_pools[0] if spec.node_pools else None
        pod = worker_pod(spec, self._meta, 0, pool, settings)
        pod["metadata"]["name"] = f"{pod['metadata']['name'][:50].rstrip('-')}-dry-run"
        while True:
            self._removal.beat()
            try:
                await self._api.try_pod(pod)
            except ApiError as error:
                if error.status == 404:
                    raise JobGone(str(error)) from None  # with its namespace
                if error.status in (400, 422):
                    return refusal(template, error.message)
                if error.status in (403, 409):  # such as a quota: that may pass, and is told when it matters
                    return ()
                self._removal.complain("check the pod template", error)
            except API_ERRORS as error:
                self._removal.complain("check the pod template", error)
            else:
                return ()
            await asyncio.sleep(TRY_SECONDS)

    def _manifest(self) -> dict[str, Any]:
        return manifest_of(self._key, self.body.get("spec") or {})

    def parsed(self) -> JobSpec | None:
        """The newest spec as it is, though it may not be followed; None if it is not valid."""
        try:
            return parse_manifest(self._manifest())
        except ManifestError:
            return None
