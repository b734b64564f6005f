"""`preempt`: takes a worker away as a cloud would, and tells what came of it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from bamboo.remote import victims
from bamboo.remote.job_view import phrases
from bamboo.remote.job_view.job_reader import JobReader
from bamboo.remote.job_view.objects import RemoteWorker
from bamboo.remote.job_view.render import JobSnapshot
from bamboo.remote.session import Session, Target, confirm
from bamboo.remote.victims import VictimChoice
from bamboo.remote.watch import JobDeleted, WaitTimedOut
from bamboo_core.complaints import complain
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import EXIT_OK, LABEL_JOB_NAME
from bamboo_core.view.job_view import JobView

LOOK_SECONDS = 0.5
TAINT_TRIES = 10
UNTAINT_SECONDS = 20.0


async def drill(
    session: Session,
    name: Target,
    choice: VictimChoice,
    *,
    kill: bool,
    node: bool,
    wait: bool,
    timeout: float,
    yes: bool,
) -> int:
    """kill: without notice. node: the victim's whole node, with all of the job's workers on it."""
    job_reader = JobReader(session.api, *session.of(name))
    snapshot = await job_reader.snapshot()
    job = snapshot.job
    if not job.status.holds("Running"):
        raise RemoteError(f"{job.name} is not training ({phrases.outcome(job)}), so there is nothing to try")
    if snapshot.missing and not snapshot.workers:
        raise RemoteError(snapshot.missing[0].removeprefix("workers: "))
    chosen = victims.victim(job, snapshot.workers, choice, random.SystemRandom().choice)
    lost = [w for w in snapshot.workers if w.alive and w.node == chosen.node] if node else [chosen]
    if objection := victims.objections(job, lost, kill=kill):
        confirm(objection, yes=yes)
    if node and not kill:
        return await _notice_to_node(session, job_reader, snapshot, lost, timeout=timeout, yes=yes)
    began = time.monotonic()
    for worker in lost:
        await session.api.delete_pod(job.namespace, worker.name, worker.uid, 0 if kill else None)
        session.say(_said(job, worker, kill))
    return await _report(session, job_reader, job, lost, began, timeout) if wait else EXIT_OK


def _said(job: JobView, worker: RemoteWorker, kill: bool) -> str:
    what = f"{phrases.places(worker.cells) or 'no stage'}, on {worker.node or 'no node'}"
    if kill:
        return f"{job.short(worker.name)} ({what}) is taken away without notice: its pod is deleted by force"
    return f"{job.short(worker.name)} ({what}) gets notice: its pod is deleted, with {worker.grace_seconds} s of grace"


# A whole node


async def _notice_to_node(
    session: Session,
    job_reader: JobReader,
    snapshot: JobSnapshot,
    lost: Sequence[RemoteWorker],
    *,
    timeout: float,
    yes: bool,
) -> int:
    """The taint is removed at the end, whatever comes in between."""
    job, name = snapshot.job, lost[0].node
    key = victims.taint_key(await session.api.node(name))
    await _mind_others(session, job, name, yes)
    began = time.monotonic()
    await set_taints(session, name, lambda node: victims.with_taint(node, key))
    try:
        who = ", ".join(f"{job.short(w.name)} ({phrases.places(w.cells) or 'no stage'})" for w in lost)
        session.say(f"node {name} gets notice (taint {key}): {who}")
        return await _report(session, job_reader, job, lost, began, timeout)
    finally:
        await _untaint(session, name, key)


async def _mind_others(session: Session, job: JobView, node: str, yes: bool) -> None:
    """Workers of other jobs on that node would have to leave as well."""
    try:
        pods = await session.api.workers_on(node)
    except ApiError as error:
        if error.status != 403:
            raise
        session.say(f"whether other jobs have workers on {node} is not known ({error})")
        return
    others = {(p["metadata"]["namespace"], p["metadata"]["labels"][LABEL_JOB_NAME]) for p in pods}
    others -= {(job.namespace, job.name)}
    if others:
        told = ", ".join(f"{namespace}/{name}" for namespace, name in sorted(others))
        confirm(f"the node {node} has workers of other jobs, too, which would have to leave it: {told}", yes=yes)


async def _untaint(session: Session, name: str, key: str) -> None:
    """Also after Ctrl-C."""
    try:
        async with asyncio.timeout(UNTAINT_SECONDS):
            if await set_taints(session, name, lambda node: victims.without_taint(node, key)):
                session.say(f"node {name} is free again: the taint {key} is removed")
    except (RemoteError, TimeoutError, asyncio.CancelledError) as error:
        if isinstance(error, ApiError) and error.status == 404:
            return
        message = f"the taint is still there; remove it: kubectl taint node {name} {key}-"
        if isinstance(error, asyncio.CancelledError):
            complain(message)
            raise
        raise RemoteError(f"{message} ({error})" if str(error) else message) from None


async def set_taints(
    session: Session, name: str, wanted: Callable[[dict[str, Any]], list[dict[str, Any]] | None]
) -> bool:
    """Though others write the node at the same time. wanted: its taints then; None if they are so: then it is False."""
    for attempt in range(TAINT_TRIES):
        node = await session.patiently(lambda: session.api.node(name))
        if (taints := wanted(node)) is None:
            return False
        try:
            await session.api.set_taints(node, taints)
            break
        except ApiError as error:
            if error.status != 409 or attempt == TAINT_TRIES - 1:
                raise
    return True


# What came of it


async def _report(
    session: Session,
    job_reader: JobReader,
    before: JobView,
    lost: Sequence[RemoteWorker],
    began: float,
    timeout: float,
) -> int:
    """Follows the drill to its end: taken over, left, protected again."""
    end = began + timeout
    training = [w for w in lost if w.cells]
    if training:
        job = await _until(
            session,
            job_reader,
            lambda job: victims.taken_over(job, before, training),
            "its stages were not taken over",
            end,
            before.uid,
        )
        if job.status.ended:
            return _over(session, job, began)
        session.say(f"{_after(began)} {_takeover(job, training)}")
    for worker in await _until_left(session, job_reader, lost, end):
        session.say(f"{_after(began)} {worker} has left")
    job = await _until(session, job_reader, lambda job: job.protected, "is not protected again", end, before.uid)
    if job.status.ended:
        return _over(session, job, began)
    if training:
        session.say(f"{_after(began)} every stage has a second copy again; a further loss costs no more than this one")
    if not victims.whole(job):
        degraded = job.status.condition("Degraded")
        session.say(f"a replacement is still missing: {degraded.message if degraded else ''}")
    return EXIT_OK


def _takeover(job: JobView, lost: Sequence[RemoteWorker]) -> str:
    last = job.status.last_takeover
    if last is None or last.victim not in {w.name for w in lost}:
        return "other workers run its stages"
    return phrases.takeover(job, last)


def _over(session: Session, job: JobView, began: float) -> int:
    session.say(f"{_after(began)} the job is over: {phrases.outcome(job)}")
    return job.exit_code or EXIT_OK


def _after(began: float) -> str:
    return f"after {time.monotonic() - began:.1f} s:"


async def _until(
    session: Session, job_reader: JobReader, met: Callable[[JobView], Any], otherwise: str, end: float, uid: str
) -> JobView:
    """Until it is so or the job is over. Raises WaitTimedOut."""
    while True:
        job = await session.patiently(job_reader.job)
        if job.uid != uid:
            raise JobDeleted(f"job {job_reader.name} was deleted, and another one of that name was created")
        if met(job) or job.status.ended:
            return job
        if time.monotonic() > end:
            why = phrases.why_waiting(job) or f"it is {job.status.state}"
            raise WaitTimedOut(f"{job.name} {otherwise} in time; {why}")
        await asyncio.sleep(LOOK_SECONDS)


async def _until_left(session: Session, job_reader: JobReader, lost: Sequence[RemoteWorker], end: float) -> list[str]:
    """Until their pods have ended; the short names of those that have, in time."""
    while True:
        snapshot = await session.patiently(job_reader.snapshot)
        living = {w.uid for w in snapshot.workers if w.alive}
        if not any(w.uid in living for w in lost) or time.monotonic() > end:
            return [snapshot.job.short(w.name) for w in lost if w.uid not in living]
        await asyncio.sleep(LOOK_SECONDS)
