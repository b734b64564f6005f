"""`task.initialFrom.job`: which checkpoint of another job it is. Pure.

It is decided once, before a job's workers train: they would not all read the same weights if each looked for itself.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from bamboo_core.job.api_object import ApiPart, read_leniently
from bamboo_core.job.spec import InitialSpec, JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.names import STORAGE_FOLDER

FIELD = "spec.task.initialFrom"


class _Claim(ApiPart, frozen=True):
    claim_name: str = ""


class _Storage(ApiPart, frozen=True):
    uri: str | None = None
    persistent_volume_claim: _Claim | None = None


class _Checkpoint(ApiPart, frozen=True):
    storage: _Storage = _Storage()


class _Spec(ApiPart, frozen=True):
    checkpoint: _Checkpoint | None = None


class _Job(ApiPart, frozen=True):
    """What of another BambooJob is looked at."""

    spec: _Spec = _Spec()
    status: BambooJobStatus = BambooJobStatus()


def unresolved(spec: JobSpec) -> InitialSpec | None:
    """The first values, if they are another job's and it is not known yet where they are."""
    initial = spec.task.initial_from
    return initial if initial is not None and initial.job is not None and initial.url is None else None


def place_in(spec: JobSpec, other: Mapping[str, Any] | None) -> dict[str, Any]:
    """`url` and `step` of the first values. spec: of a job whose first values are another's; other: that BambooJob,
    None if there is none. Raises ValueError, a sentence, if there is no checkpoint that the job's workers could read.
    """
    initial = unresolved(spec)
    assert initial is not None
    said = f"{FIELD}.job: {initial.job}"
    if other is None:
        raise ValueError(f"{FIELD}.job: there is no BambooJob {initial.job} in this namespace")
    known = read_leniently(_Job, other)
    checkpoint = known.spec.checkpoint or _Checkpoint()
    storage = checkpoint.storage
    if storage.uri is None and storage.persistent_volume_claim is None:
        raise ValueError(f"{said} keeps no checkpoints (spec.checkpoint)")
    step = initial.step if initial.step is not None else known.status.checkpoint.last_step
    if step is None:
        raise ValueError(f"{said} has no checkpoint yet")
    if storage.uri is not None:
        return {"url": storage.uri, "step": step}
    own = spec.checkpoint.storage.claim_name if spec.checkpoint is not None else None
    claim = storage.persistent_volume_claim.claim_name if storage.persistent_volume_claim else None
    if own != claim:
        raise ValueError(
            f"{said} keeps its checkpoints in claim {claim}, which the workers of this job do not mount: expected it "
            "as spec.checkpoint.storage.persistentVolumeClaim here, too"
        )
    return {"url": f"file://{STORAGE_FOLDER}/{initial.job}/checkpoints", "step": step}


def with_place(document: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, which says where the first values are."""
    changed = deepcopy(dict(document))
    changed["spec"]["task"]["initialFrom"] |= place
    return changed
