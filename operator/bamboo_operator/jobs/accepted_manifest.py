"""The manifest that a job's workers train by: as they began with it, and what has been accepted of its edits since.

It is kept in the cluster as a ControllerRevision, as those of a StatefulSet are: another operator has to manage the
workers by it, whatever the BambooJob says by then. Not in the status, which is written every 15 s: it may be as large
as the job itself.
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
    """spec: by which the workers train from now on. problems: why the newest manifest is not valid; refused: what of
    it is not followed, a sentence.
    """

    spec: JobSpec
    problems: tuple[str, ...] = ()
    refused: str = ""


def problems_of(error: ManifestError) -> tuple[str, ...]:
    return tuple(map(str, error.problems))[:MOST_PROBLEMS]


def merge_followed(accepted: Json, newest: Json) -> tuple[Json, FollowedSpec]:
    """What of the newest manifest workers follow that train by the accepted one, and what is accepted from now on.

    A job whose manifest is not valid may be suspended all the same. What the API server has accepted once may be
    invalid for another version. What may change only while a job is suspended may be changed with `suspend` itself:
    then what is followed may not go with what is not yet, and nothing of it is wrong.
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
    """What a status says of a manifest that is not accepted; "" if it is."""
    found = status.condition("Accepted")
    return found.message if found is not None and found.status == "False" else ""


class AcceptedManifest:
    """manifest: None if none was accepted, or it is not known any more."""

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
        """Whether it is in the cluster, and no older one is."""
        return self.manifest is None or (self._listed and self._saved == {self._name(self.manifest)})

    async def load(self, task: str | None) -> None:
        """What an operator before this one has accepted. Raises RemoteError.

        task: the digest of what the workers train, None if it is not known. What was accepted before the job was
        suspended, edited and resumed may still be there, if the newer one could not be written.
        """
        revisions = [r for r in await self._list() if task in (None, self._task(r))]
        if self.manifest is None and revisions:
            newest = max(revisions, key=_generation)
            self.manifest, self._generation = self._read(newest), _generation(newest)

    async def save(self) -> None:
        """Bring the cluster there: the new one is written before the old ones are deleted. Raises RemoteError."""
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
        found = await self._api.list_revisions(self._key[0], f"{LABEL_JOB_UID}={self._uid}")
        ours = [revision for revision in found if self._read(revision) is not None]
        self._saved = {str(revision["metadata"]["name"]) for revision in ours}
        self._listed = True
        return ours

    def _read(self, revision: Json) -> Json | None:
        """None for what no operator of this job has written, or could not be followed."""
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
    """Return the spec as a text that the API server never writes in another way.

    A ControllerRevision's data is immutable byte by byte. At each patch of the object (one is the garbage collector's,
    when a job is deleted with --cascade=orphan) the API server writes the data anew, as Go does: it sorts keys, has
    another form for floats, and escapes other characters. In a text it changes only the characters replaced here.
    """
    return json.dumps(spec).translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})


def _decoded(text: Any) -> Any:
    """Return the spec of such a text; None if it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _generation(revision: Json) -> int:
    """Return the job's generation of which the revision is."""
    return int(revision.get("revision") or 0)


def manifest_of(key: JobKey, spec: Json) -> dict[str, Any]:
    namespace, name = key
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
