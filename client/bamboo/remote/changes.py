"""The commands `submit`, `suspend`, `resume` and `delete`, which change jobs, and ask before progress is lost."""

import asyncio

from bamboo.job_source import JobSource
from bamboo.remote import operations
from bamboo.remote.job_reader import JobReader
from bamboo.remote.session import Session, Target, confirm
from bamboo.remote.watch import until_over
from bamboo.terminal import phrases
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import EXIT_OK
from bamboo_core.view.job_view import JobView, view_of


async def submit(
    session: Session,
    job: JobSource,
    *,
    apply: bool,
    force: bool,
    dry_run: bool,
    watch: bool,
    wanted_namespace: str | None,
) -> int:
    """Create the job, or with `apply` change an existing one; with `watch` show it to its end. dry_run: only check it.

    Return the exit code. force: take over fields that other clients manage. wanted_namespace: the value of --namespace.
    """
    before, after = await operations.submit(
        session.api, job, wanted_namespace, apply=apply, force=force, dry_run=dry_run
    )
    name, namespace = after.name, after.namespace
    session.say(f"{name} {_done(before, after)} in namespace {namespace}" + (" (dry run)" if dry_run else ""))
    if dry_run:
        return EXIT_OK
    if watch:
        return await until_over(session, namespace, name)
    flag = "" if namespace == session.api.access.namespace else f" -n {namespace}"
    session.say(f"bamboo status {name}{flag} --watch shows its progress")
    return EXIT_OK


def _done(before: JobView | None, after: JobView) -> str:
    if before is None:
        return "created"
    return "changed" if after.metadata.generation != before.metadata.generation else "unchanged"


async def suspend(session: Session, name: Target, *, yes: bool, wait: bool, timeout: float) -> int:
    job_reader = JobReader(session.api, *session.of(name))
    job = await job_reader.job()
    if job.status.ended:
        raise RemoteError(f"{job.name} is over ({job.status.state}); it cannot be suspended")
    if job.spec.suspend:
        session.say(f"{job.name} is already suspended")
        return EXIT_OK
    if lost := phrases.suspending(job):
        confirm(lost, yes=yes)
    await operations.change_spec(session.api, job, {"suspend": True})
    session.say(f"{job.name} is being suspended: its workers stop and their nodes are released")
    if wait:
        await operations.until_so(job_reader, lambda now: now.status.holds("Suspended"), "was not suspended", timeout)
        await operations.until_no_pods(session.api, job, timeout)
        session.say(f"{job.name} is suspended, and its workers are gone")
    return EXIT_OK


async def resume(session: Session, name: Target, *, wait: bool, timeout: float) -> int:
    job_reader = JobReader(session.api, *session.of(name))
    job = await job_reader.job()
    if job.status.ended:
        raise RemoteError(
            f"{job.name} is over ({job.status.state}); submit it again under another name, or delete it first"
        )
    if job.held_back:
        raise RemoteError(f"{job.name} cannot be resumed: {job.held_back}")
    if not job.spec.suspend:
        session.say(f"{job.name} is not suspended")
        return EXIT_OK
    await operations.change_spec(session.api, job, {"suspend": False})
    from_step = None if job.spec.checkpoint is None else job.status.checkpoint.last_step
    start = f"from its checkpoint at step {from_step}" if from_step else "from step 0"
    session.say(f"{job.name} is resumed {start}")
    if wait:
        now = await operations.until_so(
            job_reader, lambda job: job.status.holds("Running") or job.held_back, "did not start to train", timeout
        )
        if now.held_back:
            raise RemoteError(f"{job.name} does not start to train: {now.held_back}")
        session.say(f"{now.name} trains: {phrases.counts(now)}")
    return EXIT_OK


async def delete(session: Session, names: list[Target], *, yes: bool, wait: bool, timeout: float) -> int:
    """Delete jobs, after a confirmation if some are not over. If one does not exist, none is deleted."""
    jobs = [view_of(body) for body in await asyncio.gather(*(session.api.job(*session.of(n)) for n in names))]
    if lost := "; ".join(text for job in jobs if (text := phrases.deleting(job))):
        confirm(lost, yes=yes)
    for job in jobs:
        await session.api.delete_job(job.namespace, job.name, job.uid)
        session.say(f"{job.name} is deleted" if not wait else f"{job.name} is being deleted")
    for job in jobs if wait else []:
        await operations.until_gone(session.api, job, timeout)
        await operations.until_no_pods(session.api, job, timeout)
        session.say(f"{job.name} and its workers are gone")
    return EXIT_OK
