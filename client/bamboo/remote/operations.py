"""What is done to jobs on a cluster, for the command line and the Python API: nothing is asked and nothing printed.

All may raise RemoteError.
"""

import asyncio
import json
import time
from typing import Any, Final

from bamboo.remote.session import patiently
from bamboo.remote.watch import WaitTimedOut
from bamboo.terminal import phrases
from bamboo_core.kube.api import KubeApi
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
LOOK_SECONDS: Final = 0.5


async def existing(api: KubeApi, namespace: str, name: str) -> JobView | None:
    """The job of that name, if there is one."""
    try:
        return view_of(await api.job(namespace, name))
    except ApiError as error:
        if error.reason != "NotFound":
            raise
        return None


async def put(
    api: KubeApi, namespace: str, document: dict[str, Any], *, apply: bool, force: bool, dry_run: bool
) -> tuple[JobView | None, JobView]:
    """Makes the job of a manifest; with apply, or merges it into the one there is, with force also what others have
    set. The job before, None if there was none, and after.
    """
    name = document["metadata"]["name"]
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
    """Return the document without the fields that the server writes, so that it accepts the output of `-o yaml`."""
    metadata = {key: value for key, value in document["metadata"].items() if key not in SERVERS and value is not None}
    body = {key: value for key, value in document.items() if key != "status"}
    return {**body, "metadata": {**metadata, "namespace": namespace}}


async def change_spec(api: KubeApi, job: JobView, spec: dict[str, Any]) -> None:
    """Merges these fields into the spec of that very job."""
    await api.patch_job(job.namespace, job.name, {"metadata": {"uid": job.uid}, "spec": spec})


async def until_no_pods(api: KubeApi, job: JobView, seconds: float) -> None:
    """Waits until the job has no pods. Who may change jobs need not be allowed to look at pods: then it does not wait.

    Raises WaitTimedOut.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            pods = await patiently(lambda: api.pods(job.namespace, job.name))
        except ApiError as error:
            if error.status != 403:
                raise
            return
        mine = [p for p in pods if job.uid in json.dumps(p["metadata"].get("ownerReferences") or [])]
        if not mine:
            return
        if time.monotonic() > end:
            raise WaitTimedOut(f"{phrases.count(len(mine), 'worker')} of {job.name} did not end within {seconds:.0f} s")
        await asyncio.sleep(LOOK_SECONDS)


def history_place(job: JobView) -> str:
    """The URL of the job's history. Raises UsageError if it keeps none, or this machine cannot read it."""
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
