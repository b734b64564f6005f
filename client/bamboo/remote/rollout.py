"""`bamboo rollout`: how far the replacement of a job's workers is, holding it, and going back to what was before."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bamboo.remote.job_view.job_reader import JobReader
from bamboo.remote.session import Session, Target
from bamboo.remote.watch import WaitTimedOut
from bamboo_core.job.api_object import Metadata, read_leniently
from bamboo_core.job.edits import worker_digest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.placement_spec import WorkerSpec
from bamboo_core.job.runtime import ref_of
from bamboo_core.kube.errors import RemoteError
from bamboo_core.kube.request_parts import Object
from bamboo_core.names import ANNOTATION_RESTARTED, API_VERSION, EXIT_FAILED, EXIT_OK, KIND
from bamboo_core.view.job_view import JobView

INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRevision:
    """A `worker` section that the job's operator has accepted. number: the later, the larger. raw: as it is kept."""

    number: int
    created: datetime | None
    worker: WorkerSpec
    raw: Mapping[str, Any]


async def status(session: Session, name: Target, *, watch: bool, timeout: float) -> int:
    """One line, or one whenever it changes, until the rollout is over."""
    reader = JobReader(session.api, *session.of(name))
    end, said = time.monotonic() + timeout, ""
    while True:
        job = await session.patiently(reader.job)
        code, text = progress(job)
        if text != said:
            session.console.print(text, highlight=False, soft_wrap=True)
            said = text
        if code is not None or not watch:
            return EXIT_OK if code is None else code
        if time.monotonic() > end:
            raise WaitTimedOut(f"the rollout of {job.name} was not over within {timeout:.0f} s")
        await asyncio.sleep(INTERVAL_SECONDS)


def progress(job: JobView) -> tuple[int | None, str]:
    """With which exit code it is over, None while it is not; and a sentence."""
    rollout = job.status.rollout
    if end := job.status.ended:
        return (EXIT_OK if end.type == "Complete" else EXIT_FAILED), f"{job.name} is over ({job.status.state})"
    if job.spec.suspend:
        return EXIT_OK, f"{job.name} {_suspended(job)}"
    if rollout is None or job.status.observed_generation < job.metadata.generation:
        return None, f"waiting for the operator to see the newest change of {job.name}"
    if job.held_back:
        return EXIT_OK, f"{job.name} {_suspended(job)}"
    done = f"{rollout.updated} of {rollout.total} workers of {job.name} are of revision {rollout.revision}"
    if rollout.state == "Complete":
        return EXIT_OK, f"all workers of {job.name} are of revision {rollout.revision}"
    if rollout.state == "Stalled":
        return EXIT_FAILED, f"{done}; the rollout has stalled: {rollout.message}"
    return None, f"{done}; the rollout is paused" if rollout.state == "Paused" else done


def _suspended(job: JobView) -> str:
    why = f" ({job.held_back})" if job.held_back else ""
    return f"is suspended{why}; all its workers are made anew when it {'goes on' if why else 'is resumed'}"


async def set_paused(session: Session, name: Target, *, paused: bool) -> int:
    job = await _living(session, name)
    word = "paused" if paused else "resumed"
    if job.spec.rollout.paused is paused:
        session.say(f"the rollout of {job.name} is {'already' if paused else 'not'} paused")
        return EXIT_OK
    body = {"metadata": {"uid": job.uid}, "spec": {"rollout": {"paused": paused}}}
    await session.api.patch_job(job.namespace, job.name, body)
    session.say(f"the rollout of {job.name} is {word}")
    return EXIT_OK


async def restart(session: Session, name: Target, now: datetime) -> int:
    """Have all workers replaced, one after the other. Raises RemoteError if that could not begin now."""
    job = await _living(session, name)
    if job.suspended:
        raise RemoteError(f"{job.name} {_suspended(job)}")
    if job.spec.rollout.paused:
        raise RemoteError(f"the rollout of {job.name} is paused; run `bamboo rollout resume {job.name}` first")
    mark = {ANNOTATION_RESTARTED: now.isoformat(timespec="seconds")}
    worker = {"template": {"metadata": {"annotations": mark}}}
    await session.api.patch_job(job.namespace, job.name, {"metadata": {"uid": job.uid}, "spec": {"worker": worker}})
    session.say(f"the workers of {job.name} are replaced one after the other")
    return EXIT_OK


async def history(session: Session, name: Target) -> int:
    namespace, job_name = session.of(name)
    body = await session.api.job(namespace, job_name)
    found = await _revisions(session, body)
    now = _worker_of(body) if ref_of(body) is None or not found else found[-1].worker
    if not found:
        session.say(f"{job_name} has no revisions: its operator has accepted none yet")
        return EXIT_OK
    lines = [("REVISION", "IMAGE", "")]
    for one in found:
        mark = "in force" if now is not None and worker_digest(one.worker) == worker_digest(now) else ""
        lines.append((str(one.number), one.worker.image or "(the operator's default)", mark))
    widths = [max(len(row[column]) for row in lines) for column in (0, 1)]
    for number, image, mark in lines:
        text = f"{number:<{widths[0]}}  {image:<{widths[1]}}  {mark}".rstrip()
        session.console.print(text, highlight=False, soft_wrap=True, markup=False)
    return EXIT_OK


async def undo(session: Session, name: Target, *, to: int | None) -> int:
    """Raises RemoteError if there is nothing to go back to."""
    job = await _living(session, name)
    body = await session.api.job(job.namespace, job.name)
    if (ref := ref_of(body)) is not None:
        raise RemoteError(f"the workers of {job.name} are of its runtime, too: change {ref}, or spec.worker")
    current, found = _worker_of(body), await _revisions(session, body)
    chosen = revision_to_restore(found, current, to)
    if chosen is None:
        known = ", ".join(str(one.number) for one in found) or "none"
        wanted = "an earlier revision" if to is None else f"revision {to}"
        raise RemoteError(f"{job.name} has no {wanted} with another worker section; there are: {known}")
    change = difference(body["spec"].get("worker") or {}, chosen.raw)
    await session.api.patch_job(job.namespace, job.name, {"metadata": {"uid": job.uid}, "spec": {"worker": change}})
    session.say(f"{job.name} goes back to the worker section of revision {chosen.number}")
    return EXIT_OK


def revision_to_restore(
    found: list[WorkerRevision], current: WorkerSpec | None, to: int | None
) -> WorkerRevision | None:
    """The one of that number; without a number the newest one that is another one than now."""
    digest = worker_digest(current) if current is not None else None
    others = [one for one in found if worker_digest(one.worker) != digest]
    return next((one for one in reversed(others) if to in (None, one.number)), None)


def difference(now: Mapping[str, Any], wanted: Mapping[str, Any]) -> Object:
    """The merge patch that makes the one into the other."""
    patch: Object = dict.fromkeys(now.keys() - wanted.keys())
    for key, value in wanted.items():
        before = now.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := difference(before, value):
                patch[key] = inner
        elif key not in now or before != value:
            patch[key] = value
    return patch


async def _living(session: Session, name: Target) -> JobView:
    job = await JobReader(session.api, *session.of(name)).job()
    if job.status.ended:
        raise RemoteError(f"{job.name} is over ({job.status.state}); it has no workers to replace")
    return job


async def _revisions(session: Session, body: Object) -> list[WorkerRevision]:
    """Oldest first."""
    metadata = read_leniently(Metadata, body["metadata"])
    kept = await session.api.revisions(metadata.namespace, metadata.uid)
    found = []
    for revision in kept:
        spec = (revision.get("data") or {}).get("spec") or {}
        worker = _worker_of({"metadata": {"name": metadata.name}, "spec": spec})
        if worker is not None:
            created = read_leniently(Metadata, revision["metadata"]).creation_timestamp
            number, raw = int(revision.get("revision") or 0), spec.get("worker") or {}
            found.append(WorkerRevision(number=number, created=created, worker=worker, raw=raw))
    return sorted(found, key=lambda one: one.number)


def _worker_of(body: Object) -> WorkerSpec | None:
    """None of what this version cannot read."""
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": body["metadata"]["name"]}}
    try:
        return parse_manifest({**document, "spec": body.get("spec") or {}}).worker
    except ManifestError:
        return None
