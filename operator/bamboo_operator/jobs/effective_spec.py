"""The spec in force for a job: the user's newest one, unless it is invalid or running workers cannot follow its edits.

A job's accepted manifest is the one its workers started with, plus the edits accepted since. It is stored as a
ControllerRevision, like those of a StatefulSet, because the next operator must manage the workers by it, whatever the
BambooJob says then. The status, rewritten every 15 s, is no place for a text as large as the job.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from bamboo_core.coordinator.events import Emit
from bamboo_core.job.edits import apply_edit_to_manifest, refusal_message, refused_fields, task_digest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.manifest_warnings import warnings as manifest_warnings
from bamboo_core.job.pod_templates import PATH, pool_path
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, JobGone
from bamboo_core.names import API_VERSION, KIND, LABEL_JOB_NAME, LABEL_JOB_UID
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity, JobKey
from bamboo_operator.manifests.worker_pod import (
    WorkerPodSettings,
    owner,
    template_problems,
    worker_pod,
)

Json = Mapping[str, Any]
MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSpec:
    """The spec that the workers follow.

    spec: the spec in force. problems: why the newest manifest, or its merge with the accepted one, is invalid. refused:
    a sentence about edits that are not followed.
    """

    spec: JobSpec
    problems: tuple[str, ...] = ()
    refused: str = ""


def problems_of(error: ManifestError) -> tuple[str, ...]:
    return tuple(map(str, error.problems))[:MOST_PROBLEMS]


def merge_followed(accepted: Json, newest: Json) -> tuple[Json, FollowedSpec]:
    """Merge the newest manifest into the accepted one; return the new accepted manifest and the spec to follow.

    If the newest or the merged manifest is invalid, the accepted one stays, and the spec takes over only `suspend`. A
    valid newest manifest that suspends the job may also change fields that stay fixed while it runs; the merged one may
    then be invalid, which is not reported as a problem.
    """
    suspend = (newest.get("spec") or {}).get("suspend") is True
    wanted: JobSpec | None = None
    try:
        wanted = parse_manifest(newest)
        merged = apply_edit_to_manifest(accepted, newest)
        spec = parse_manifest(merged)
    except ManifestError as error:
        kept = replace(parse_manifest(accepted), suspend=suspend)
        halfway = suspend and wanted is not None
        return accepted, FollowedSpec(spec=kept, problems=() if halfway else problems_of(error))
    names = refused_fields(spec, wanted)
    return merged, FollowedSpec(spec=spec, refused=refusal_message(names) if names and not suspend else "")


def refusal_in(status: BambooJobStatus) -> str:
    """Return the message with which a status reports the manifest as not accepted; "" if it does not."""
    condition = status.condition("Accepted")
    return condition.message if condition is not None and condition.status == "False" else ""


class AcceptedManifest:
    """The accepted manifest and its copy in the cluster. manifest: None if none is accepted or known."""

    def __init__(self, job: JobIdentity, api: KubeApi) -> None:
        (self._key, self._uid), self._api = job, api
        self.manifest: Json | None = None
        self._generation = 0
        self._saved: set[str] = set()  # names of this job's ControllerRevisions
        self._listed = False

    def accept(self, manifest: Json, generation: int) -> None:
        if manifest != self.manifest:
            self.manifest, self._generation = deepcopy(manifest), generation

    @property
    def saved(self) -> bool:
        """Whether the cluster holds exactly the accepted manifest; True if there is none."""
        return self.manifest is None or (self._listed and self._saved == {self._name(self.manifest)})

    async def load(self, task: str | None) -> None:
        """Load the manifest that an earlier operator accepted, unless one is known. Raises RemoteError.

        task: digest of the task that the workers train; None if unknown. Manifests with another task are ignored:
        they are from before a suspension, and remain if the newer one could not be written.
        """
        revisions = [r for r in await self._list() if task in (None, self._task(r))]
        if self.manifest is None and revisions:
            newest = max(revisions, key=_generation)
            self.manifest, self._generation = self._read(newest), _generation(newest)

    async def save(self) -> None:
        """Save the manifest: create the new revision, then delete the old ones. Raises RemoteError."""
        if self.manifest is None:
            return
        if not self._listed:
            await self._list()
        name = self._name(self.manifest)
        if name not in self._saved:
            try:
                await self._api.create_revision(self._revision(name, self.manifest))
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
            self._saved.add(name)
        for old in sorted(self._saved - {name}):
            await self._api.delete_revision(self._key[0], old)
            self._saved.discard(old)

    async def _list(self) -> list[dict[str, Any]]:
        revisions = await self._api.list_revisions(self._key[0], f"{LABEL_JOB_UID}={self._uid}")
        ours = [revision for revision in revisions if self._read(revision) is not None]
        self._saved = {str(revision["metadata"]["name"]) for revision in ours}
        self._listed = True
        return ours

    def _read(self, revision: Json) -> Json | None:
        """Return a revision's manifest; None if it is invalid or the revision does not belong to this job."""
        owners = (revision.get("metadata") or {}).get("ownerReferences") or ()
        spec = _decoded((revision.get("data") or {}).get("spec"))
        if not isinstance(spec, dict) or not any(o.get("uid") == self._uid and o.get("controller") for o in owners):
            return None
        manifest = manifest_of(self._key, spec)
        try:
            parse_manifest(manifest)
        except ManifestError:
            return None
        return manifest

    def _task(self, revision: Json) -> str | None:
        manifest = self._read(revision)
        return None if manifest is None else task_digest(parse_manifest(manifest))

    def _name(self, manifest: Json) -> str:
        content = json.dumps([self._uid, self._generation, manifest["spec"]], sort_keys=True)
        return f"{self._key[1][:200]}-{sha256(content.encode()).hexdigest()[:10]}"

    def _revision(self, name: str, manifest: Json) -> dict[str, Any]:
        return {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {
                "name": name,
                "namespace": self._key[0],
                "labels": {LABEL_JOB_NAME: self._key[1], LABEL_JOB_UID: self._uid},
                "ownerReferences": [owner(self._key[1], self._uid)],
            },
            "data": {"spec": _encoded(manifest["spec"])},
            "revision": self._generation,
        }


def _encoded(spec: Json) -> str:
    """Return the spec as a text that the API server never changes.

    A ControllerRevision's data must never change by a byte. At each patch of the object, such as the garbage
    collector's for --cascade=orphan, the API server encodes the data anew as Go does: with sorted keys, other floats
    and other escapes. Inside a text it changes only the characters that are replaced here.
    """
    return json.dumps(spec).translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})


def _decoded(text: Any) -> Any:
    """Return the spec in a text that `_encoded` wrote; None if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _generation(revision: Json) -> int:
    """Return the job's generation that a revision records; 0 if it records none."""
    return int(revision.get("revision") or 0)


def manifest_of(key: JobKey, spec: Json) -> dict[str, Any]:
    namespace, name = key
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


class EffectiveSpec:
    """One job's spec in force, and the findings of the last check of its newest manifest.

    body: the BambooJob. written: its status. spec: the spec in force; None until one is valid. generation:
    the newest manifest's generation. problems: that manifest's errors. refused: its changes that a running job does not
    follow. warnings: about its templates' ignored fields and hostNetwork. surprises: settings that may not be intended.
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
        """Replace the BambooJob with a newer version of it."""
        self._body = body

    def report_problems(self, record: Callable[[Emit], None]) -> None:
        """Record the manifest's problems or refused edits as an event; once, even if another operator takes over."""
        message = "; ".join(self.problems) or self.refused
        if message and message != self._reported:
            record(Emit("InvalidSpec" if self.problems else "ChangeRefused", message, True))
        self._reported = message

    def begin(self, *, resumed: bool) -> dict[str, Any]:
        """Return the accepted manifest. First accept the newest, unless the training is resumed and one is accepted."""
        if not resumed or self.accepted.manifest is None:
            self.accepted.accept(self._manifest(), self._newest)
        return dict(self.accepted.manifest or {})

    async def next(self, plan: str | None, settings: WorkerPodSettings) -> JobSpec | None:
        """Return the spec by which the job runs from now on; None if it cannot run, for the reasons in `problems`.

        plan: the plan record in the status, if workers train, perhaps since an earlier operator. Raises JobGone.
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
        """Load the manifest by which the workers train. Log a refusal (403, 404); a later call tries again."""
        what = "read the manifest that the job's workers run with"
        act = partial(self.accepted.load, BambooJobStatus(plan=plan).plan_record.task)
        if refused := await self._attempts.until_done(what, act, ends=(403, 404)):  # a later call tries again
            self._attempts.log_failure(what, refused)

    def follow(self) -> JobSpec:
        """Accept the edits that running workers can follow, and return the resulting spec."""
        accepted = self.accepted.manifest or self._manifest()
        merged, followed = merge_followed(accepted, self._manifest())
        self.accepted.accept(merged, self._newest)
        self.generation, self.problems, self.refused = self._newest, followed.problems, followed.refused
        self.spec, self.surprises = followed.spec, tuple(manifest_warnings(followed.spec))
        self.warnings = tuple(template_problems(followed.spec))
        return followed.spec

    def read(self) -> JobSpec | None:
        """Put the newest spec in force and return it; None if it is invalid: then the earlier one stays in force."""
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
        """The generation of the newest manifest."""
        return int(self._body["metadata"].get("generation") or 0)

    async def _dry_run(self, spec: JobSpec, settings: WorkerPodSettings) -> tuple[str, ...]:
        """Create a pod of each template as a dry run; return the API server's first objection, or ()."""
        pool = replace(spec.node_pools[0], template={}) if spec.node_pools else None
        problems = await self._dry_run_of(worker_pod(spec, self._uid, 0, pool, settings), PATH)
        for index, one in enumerate(spec.node_pools):
            if one.template and not problems:
                pod = worker_pod(spec, self._uid, 0, one, settings)
                problems = await self._dry_run_of(pod, pool_path(index))
        return problems

    async def _dry_run_of(self, pod: dict[str, Any], path: str) -> tuple[str, ...]:
        """Create a pod as a dry run; return the API server's objection to its template, or (). path: the template's
        path in the manifest. A refusal for another reason, such as a quota, is reported when the pods are created.
        Raises JobGone if the namespace is gone.
        """
        pod["metadata"]["name"] = f"{pod['metadata']['name'][:50].rstrip('-')}-dry-run"
        try_pod = partial(self._api.try_pod, pod)
        error = await self._attempts.until_done("check the pod template", try_pod, ends=(400, 403, 404, 409, 422, 500))
        if error is not None and error.status == 404:
            raise JobGone(str(error))  # the namespace is gone, too
        return (f"{path}: {error}",) if error is not None and error.status in (400, 422) else ()

    def _manifest(self) -> dict[str, Any]:
        return manifest_of(self._key, self._body.get("spec") or {})

    def parsed(self) -> JobSpec | None:
        """Return the newest spec even if it is not followed; None if it is invalid."""
        try:
            return parse_manifest(self._manifest())
        except ManifestError:
            return None


def _changed_task(plan: str, spec: JobSpec) -> tuple[str, ...]:
    """Return a problem if the job is not suspended and its task is known to have changed since it began; else ()."""
    began = BambooJobStatus(plan=plan).plan_record.task
    if spec.suspend or began is None or began == task_digest(spec):
        return ()
    return ("spec.task: expected the task that the job began with; it was changed while the workers were training",)
