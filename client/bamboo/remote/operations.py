"""Operations on a cluster's jobs, for the command line and the Python API, without prompts or output.

All functions may raise RemoteError.
"""

import json
from collections.abc import Callable
from typing import Any, Final

from bamboo.job_source import JobSource
from bamboo.remote.job_reader import JobReader
from bamboo.remote.session import until
from bamboo.terminal import phrases
from bamboo.terminal.snapshot import RemoteWorker
from bamboo_core.kube.api import KubeApi, Object
from bamboo_core.kube.errors import ApiError, RemoteError, UsageError
from bamboo_core.view.job_view import JobView, view_of

SERVERS: Final = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "selfLink",
    "deletionTimestamp",
)


async def existing(api: KubeApi, namespace: str, name: str) -> JobView | None:
    """Return the job with this name; None if there is none."""
    try:
        return view_of(await api.job(namespace, name))
    except ApiError as error:
        if error.reason != "NotFound":
            raise
        return None


async def submit(
    api: KubeApi, job: JobSource, namespace: str | None, *, apply: bool, force: bool, dry_run: bool
) -> tuple[JobView | None, JobView]:
    """Create a manifest's job, or with `apply` change an existing one, by server-side apply. dry_run: store nothing.

    Return the job before the change (None if it did not exist) and after it. namespace: the user's choice; None for the
    manifest's, or else the kubeconfig's. force: take over fields that other clients manage. Raises UsageError if the
    manifest's namespace differs, RemoteError for an existing job without `apply` or for such fields without `force`.
    """
    document, named = job.document, job.document["metadata"].get("namespace")
    if named and namespace and named != namespace:
        raise UsageError(f"{job.name}: metadata.namespace is {named}, but namespace {namespace} was given")
    namespace, name = str(named or namespace or api.access.namespace), document["metadata"]["name"]
    before = await existing(api, namespace, name)
    if before is not None and not apply:
        raise RemoteError(
            f"job {name} exists in namespace {namespace} ({before.status.state}); --apply merges the manifest into it,"
            f" bamboo delete {name} removes it"
        )
    try:
        after = await api.apply_job(namespace, _trimmed(document, namespace), force=force, dry_run=dry_run)
    except ApiError as error:
        if error.status == 409:
            raise RemoteError(f"{name}: {error}; --force takes these fields over") from None
        raise
    return before, view_of(after)


def _trimmed(document: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return the document with this namespace, without its status and the metadata that the API server sets."""
    metadata = {key: value for key, value in document["metadata"].items() if key not in SERVERS and value is not None}
    body = {key: value for key, value in document.items() if key != "status"}
    return {**body, "metadata": {**metadata, "namespace": namespace}}


async def change_spec(api: KubeApi, job: JobView, spec: dict[str, Any]) -> None:
    """Merge fields into the job's spec. The API server refuses if the name now belongs to a job with another uid."""
    await api.patch_job(job.namespace, job.name, {"metadata": {"uid": job.uid}, "spec": spec})


async def take_away(api: KubeApi, job: JobView, worker: RemoteWorker, *, notice: bool) -> None:
    """Delete the worker's pod, with its grace period or by force. Raises RemoteError if it is gone already."""
    if not await api.delete_pod(job.namespace, worker.name, worker.uid, None if notice else 0):
        raise RemoteError(f"{worker.name} is gone already")


async def until_so(
    job_reader: JobReader, met: Callable[[JobView], object], what: str, seconds: float | None
) -> JobView:
    """Wait until the job meets a condition, and return it. Raises WaitTimedOut, JobDeleted.

    what: a verb phrase for the error, such as "was not suspended". seconds: None waits forever.
    """

    def otherwise(job: JobView) -> str:
        why = phrases.why_waiting(job)
        return f"{job.name} {what} within {seconds or 0:.0f} s; it is {job.status.state}" + (f": {why}" if why else "")

    return await until(job_reader.job, met, otherwise, seconds)


async def until_gone(api: KubeApi, job: JobView, seconds: float) -> None:
    """Wait until the job is gone, even if a new job has its name. Raises WaitTimedOut."""
    await until(
        lambda: existing(api, job.namespace, job.name),
        lambda now: now is None or now.uid != job.uid,
        lambda _: f"{job.name} was not deleted within {seconds:.0f} s; does it have finalizers?",
        seconds,
    )


async def until_no_pods(api: KubeApi, job: JobView, seconds: float) -> None:
    """Wait until the job has no pods; do not wait if the user may not list pods. Raises WaitTimedOut."""

    async def mine() -> list[Object]:
        try:
            pods = await api.pods(job.namespace, job.name)
        except ApiError as error:
            if error.status != 403:
                raise
            return []
        return [pod for pod in pods if job.uid in json.dumps(pod["metadata"].get("ownerReferences") or [])]

    await until(
        mine,
        lambda pods: not pods,
        lambda pods: f"{phrases.count(len(pods), 'worker')} of {job.name} did not end within {seconds:.0f} s",
        seconds,
    )


def history_place(job: JobView) -> str:
    """Return the URL of the job's history. Raises UsageError if there is none, or this machine cannot read it."""
    checkpoint = job.spec.checkpoint
    if checkpoint is not None and checkpoint.url:
        return f"{checkpoint.url.rstrip('/')}/history/{job.name}"
    if checkpoint is not None and checkpoint.claim:
        raise UsageError(
            f"the history of {job.name} is in the folder {job.name}/checkpoints/history of the claim"
            f" {checkpoint.claim}, which this machine cannot read; copy it from a pod that mounts the claim"
            " (docs/history.md)"
        )
    raise UsageError(f"{job.name} keeps no history: its spec.checkpoint names no storage")
