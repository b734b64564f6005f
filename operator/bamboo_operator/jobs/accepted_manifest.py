"""The accepted manifest of a job: the one its workers started with, plus the edits accepted since.

It is stored as a ControllerRevision, like those of a StatefulSet, because the next operator must manage the workers by
it, whatever the BambooJob says then. The status, rewritten every 15 s, is no place for a text as large as the job.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from bamboo_core.job.edits import apply_edit_to_manifest, refusal_message, refused_fields, task_digest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError
from bamboo_core.names import API_VERSION, KIND, LABEL_JOB_NAME, LABEL_JOB_UID
from bamboo_operator.kube.objects import JobIdentity, JobKey
from bamboo_operator.manifests.worker_pod import owner

Json = Mapping[str, Any]
MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSpec:
    """The spec that the workers follow.

    spec: the spec in force. problems: why the newest manifest is invalid. refused: a sentence about edits that are not
    followed.
    """

    spec: JobSpec
    problems: tuple[str, ...] = ()
    refused: str = ""


def problems_of(error: ManifestError) -> tuple[str, ...]:
    return tuple(map(str, error.problems))[:MOST_PROBLEMS]


def merge_followed(accepted: Json, newest: Json) -> tuple[Json, FollowedSpec]:
    """Merge the newest manifest into the accepted one; return the new accepted manifest and the spec to follow.

    A job may be suspended even if its manifest is invalid. A manifest accepted once may be invalid for another version
    of Bamboo. Fields that may change only while the job is suspended may change together with `suspend`; the mixture of
    old and new fields may then be invalid, which is no problem of the manifest.
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
    """Return the reason why a status reports the manifest as not accepted; "" if it is accepted."""
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
        """Return whether the cluster holds exactly the accepted manifest."""
        return self.manifest is None or (self._listed and self._saved == {self._name(self.manifest)})

    async def load(self, task: str | None) -> None:
        """Load the manifest that an earlier operator accepted. Raises RemoteError.

        task: digest of the task that the workers train; None if unknown. It excludes manifests from before a
        suspension, which remain if the newer one could not be written.
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
        """Return a revision's manifest; None if no operator of this job wrote it or it is invalid."""
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

    A ControllerRevision's data is immutable byte by byte. At each patch of the object, such as the garbage collector's
    for --cascade=orphan, the API server encodes the data anew as Go does: with sorted keys, other floats and other
    escapes. In a text it changes only the characters replaced here.
    """
    return json.dumps(spec).translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})


def _decoded(text: Any) -> Any:
    """Return the spec of such a text, or None."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _generation(revision: Json) -> int:
    """Return the generation of the job that the revision stores."""
    return int(revision.get("revision") or 0)


def manifest_of(key: JobKey, spec: Json) -> dict[str, Any]:
    namespace, name = key
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
