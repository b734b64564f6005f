"""The view of a job that is followed until it is over: a picture on a terminal, else lines."""

import asyncio
from contextlib import suppress

from bamboo.remote.job_reader import JobReader
from bamboo.remote.session import Session, on_a_terminal, patiently
from bamboo.terminal import phrases
from bamboo.terminal.live_view import LineScreen, PictureScreen, Screen
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import EXIT_OK

INTERVAL_SECONDS = 2.0
FINAL_EVENTS_SECONDS = 1.0  # the operator posts a job's last events after its last status


def screen(session: Session) -> Screen:
    if on_a_terminal() and not session.quiet:
        return PictureScreen(session.console)
    return LineScreen(session.say)


async def until_over(session: Session, namespace: str, name: str, interval: float = INTERVAL_SECONDS) -> int:
    """Show the job until it is over; return the exit code of its outcome. Ctrl-C leaves the job as it is."""
    job_reader, first, shown = JobReader(session.api, namespace, name), True, screen(session)
    shown.open("looking ...")
    try:
        try:
            while True:
                snapshot = await patiently(job_reader.snapshot)
                shown.show(snapshot)
                if snapshot.job.status.ended:
                    break
                first = False
                await asyncio.sleep(interval)
            if not first:
                await _final_events(job_reader, shown)
        finally:
            shown.close()
    except asyncio.CancelledError:
        session.say(f"the job continues; bamboo status {name} --watch shows it again")
        raise
    if not isinstance(shown, PictureScreen):
        session.say(phrases.outcome(snapshot.job))
    return EXIT_OK if snapshot.job.exit_code is None else snapshot.job.exit_code


async def _final_events(job_reader: JobReader, shown: Screen) -> None:
    """Show the events after the job's end, if the cluster answers and the job still exists."""
    await asyncio.sleep(FINAL_EVENTS_SECONDS)
    with suppress(RemoteError):
        shown.show(await job_reader.snapshot())
