"""Follow a job until it is over: as a picture on a terminal, else as lines."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from rich.console import Console

from bamboo.remote.job_reader import JobReader, UnseenEvents
from bamboo.remote.session import Session, on_a_terminal, patiently
from bamboo.terminal import phrases
from bamboo.terminal.live_view import LivePicture
from bamboo.terminal.picture import events
from bamboo.terminal.snapshot import JobSnapshot
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import EXIT_OK

INTERVAL_SECONDS = 2.0
FINAL_EVENTS_SECONDS = 1.0  # the operator posts a job's last events after its last status


class Screen(Protocol):
    def __enter__(self) -> "Screen": ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, snapshot: JobSnapshot) -> None: ...


class LiveScreen:
    """A picture that changes; the last one stays."""

    def __init__(self, console: Console) -> None:
        self._picture = LivePicture(console)
        self._snapshot: JobSnapshot | None = None

    def __enter__(self) -> "LiveScreen":
        self._picture.open("looking ...")
        return self

    def __exit__(self, *_: object) -> None:
        self._picture.close(self._snapshot)

    def show(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        self._picture.draw(snapshot)


class LineScreen:
    """Lines for logs and pipes: events, changes of state, and new progress."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._unseen, self._told = say, UnseenEvents(), ""

    def __enter__(self) -> "LineScreen":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, snapshot: JobSnapshot) -> None:
        now = datetime.now(UTC)
        for line in events(self._unseen.of(snapshot.events), now, snapshot.job, times=True):
            self._say(str(line))
        headline = f"{snapshot.job.state.name}, {phrases.progress(snapshot.job)}"
        if headline != self._told:
            self._told = headline
            self._say(headline)


def screen(session: Session) -> Screen:
    if on_a_terminal() and not session.quiet:
        return LiveScreen(session.console)
    return LineScreen(session.say)


async def until_over(session: Session, namespace: str, name: str, interval: float = INTERVAL_SECONDS) -> int:
    """Show the job until it is over; return the exit code of its outcome. Ctrl-C leaves the job as it is."""
    job_reader, first = JobReader(session.api, namespace, name), True
    try:
        with screen(session) as shown:
            while True:
                snapshot = await patiently(job_reader.snapshot)
                shown.show(snapshot)
                if snapshot.job.status.ended:
                    break
                first = False
                await asyncio.sleep(interval)
            if not first:
                await _final_events(job_reader, shown)
    except asyncio.CancelledError:
        session.say(f"the job continues; bamboo status {name} --watch shows it again")
        raise
    if not isinstance(shown, LiveScreen):
        session.say(phrases.outcome(snapshot.job))
    return EXIT_OK if snapshot.job.exit_code is None else snapshot.job.exit_code


async def _final_events(job_reader: JobReader, shown: Screen) -> None:
    """Show the events that came after the end, if cluster and job are still there."""
    await asyncio.sleep(FINAL_EVENTS_SECONDS)
    with suppress(RemoteError):
        shown.show(await job_reader.snapshot())
