"""Owners and timestamps of Kubernetes objects, which are plain mappings."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from bamboo_core.names import KIND, LABEL_JOB_NAME, LABEL_JOB_UID

JobKey = tuple[str, str]  # namespace and name


class JobIdentity(NamedTuple):
    """The namespace, name and UID of a BambooJob. The UID differs between jobs of the same name."""

    key: JobKey
    uid: str


def owner_uid(pod: Mapping[str, Any]) -> str | None:
    """Return the UID of the pod's BambooJob, even if the job was deleted with --cascade=orphan; None for other pods."""
    metadata = pod.get("metadata") or {}
    if not (owners := metadata.get("ownerReferences")):
        return (metadata.get("labels") or {}).get(LABEL_JOB_UID)
    return next((o.get("uid") for o in owners if o.get("controller") and o.get("kind") == KIND), None)


def job_of(pod: Mapping[str, Any]) -> JobKey | None:
    """Return the namespace and name of a worker pod's job, by its labels; None for other pods."""
    name = (pod["metadata"].get("labels") or {}).get(LABEL_JOB_NAME)
    return (pod["metadata"]["namespace"], name) if name else None


def utc_now() -> datetime:
    return datetime.now(UTC)


def api_time(when: datetime) -> str:
    """Format a time as the Kubernetes API does, in whole seconds of UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parsed_time(text: Any) -> datetime | None:
    """Parse a time of the Kubernetes API, in UTC if it has no zone. Return None if it is absent or invalid."""
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return time and time.replace(tzinfo=time.tzinfo or UTC)
