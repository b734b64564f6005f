"""The command `preempt`, which takes a worker away as a cloud would, and reports the consequences."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from bamboo.remote import operations, victims
from bamboo.remote.job_reader import JobReader
from bamboo.remote.session import Session, Target, WaitTimedOut, confirm, until
from bamboo.remote.victims import VictimChoice
from bamboo.terminal import phrases
from bamboo.terminal.snapshot import RemoteWorker
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import EXIT_OK
from bamboo_core.view.job_view import JobView


async def drill(
    session: Session,
    name: Target,
    choice: VictimChoice,
    *,
    kill: bool,
    wait: bool,
    timeout: float,
    yes: bool,
) -> int:
    """Preempt a worker of a training job: delete its pod, after a confirmation if the job may suffer.

    kill: delete it by force, without notice. wait: report the recovery until the job is protected again; WaitTimedOut
    after `timeout` seconds. Return the exit code. Raises RemoteError if the job does not train.
    """
    job_reader = JobReader(session.api, *session.of(name))
    snapshot = await job_reader.snapshot()
    job = snapshot.job
    if not job.status.holds("Running"):
        raise RemoteError(f"{job.name} is not training ({phrases.outcome(job)}), so there is nothing to try")
    if snapshot.missing and not snapshot.workers:
        raise RemoteError(snapshot.missing[0].removeprefix("workers: "))
    chosen = victims.victim(job, snapshot.workers, choice, random.SystemRandom().choice)
    if objection := victims.objections(job, datetime.now(UTC), kill=kill):
        confirm(objection, yes=yes)
    began = time.monotonic()
    await operations.take_away(session.api, job, chosen, notice=not kill)
    session.say(_announced(job, chosen, kill))
    return await _report(session, job_reader, job, chosen, began, timeout) if wait else EXIT_OK


def _announced(job: JobView, worker: RemoteWorker, kill: bool) -> str:
    what = f"{phrases.places(worker.cells) or 'no stage'}, on {worker.node or 'no node'}"
    if kill:
        return f"{job.short(worker.name)} ({what}) is taken away without notice: its pod is deleted by force"
    return f"{job.short(worker.name)} ({what}) gets notice: its pod is deleted, with {worker.grace_seconds} s of grace"


# consequences


async def _report(
    session: Session,
    job_reader: JobReader,
    before: JobView,
    lost: RemoteWorker,
    began: float,
    timeout: float,
) -> int:
    """Wait for each phase of the recovery and print it: stages taken over, pod gone, job protected again.

    Return the job's exit code if it ends meanwhile, else EXIT_OK. Raises WaitTimedOut, but not for a pod that stays.
    """

    async def so(met: Callable[[JobView], bool], otherwise: str) -> JobView:
        """Wait until the job meets a condition or is over."""
        left = began + timeout - time.monotonic()
        return await operations.until_so(job_reader, lambda job: met(job) or job.status.ended, otherwise, left)

    if lost.cells:
        job = await so(lambda job: victims.taken_over(job, before, lost), "lost stages that were not taken over")
        if job.status.ended:
            return _over(session, job, began)
        session.say(f"{_after(began)} other workers run its stages")
    with suppress(WaitTimedOut):
        await until(
            job_reader.snapshot,
            lambda seen: not any(w.uid == lost.uid and w.alive for w in seen.workers),
            lambda _: f"{lost.name} has not left",
            began + timeout - time.monotonic(),
        )
        session.say(f"{_after(began)} {before.short(lost.name)} has left")
    job = await so(lambda job: job.protected, "is not protected again")
    if job.status.ended:
        return _over(session, job, began)
    if lost.cells:
        session.say(f"{_after(began)} every stage has a second copy again; a further loss costs no more than this one")
    if not victims.whole(job):
        degraded = job.status.condition("Degraded")
        session.say(f"a replacement is still missing: {degraded.message if degraded else ''}")
    return EXIT_OK


def _over(session: Session, job: JobView, began: float) -> int:
    session.say(f"{_after(began)} the job is over: {phrases.outcome(job)}")
    return job.exit_code or EXIT_OK


def _after(began: float) -> str:
    return f"after {time.monotonic() - began:.1f} s:"
