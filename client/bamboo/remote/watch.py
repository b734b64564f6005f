"""Follows a job until it is over: live on a terminal, else as lines."""

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
from bamboo.terminal.picture import Footer, events
from bamboo.terminal.snapshot import JobSnapshot
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import EXIT_OK

INTERVAL_SECONDS = 2.0
FINAL_EVENTS_SECONDS = 1.0  # the operator posts a job's last events after its last status
KEYS = "q quits; the job continues"


class Screen(Protocol):
    def __enter__(self) -> "Screen": ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, snapshot: JobSnapshot) -> None: ...


class LiveScreen:
    """A picture that changes; the last one stays. quit: set when q is pressed."""

    def __init__(self, console: Console, quit: asyncio.Event) -> None:
        self._keys: tuple[str, ...] = (KEYS,)
        self._quit = quit
        self._picture = LivePicture(console, lambda: Footer(hints=self._keys), self._key)
        self._snapshot: JobSnapshot | None = None

    def __enter__(self) -> "LiveScreen":
        self._picture.open("looking ...")
        return self

    def __exit__(self, *_: object) -> None:
        self._keys = ()
        self._picture.close(self._snapshot)

    def show(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        self._picture.draw(snapshot)

    def _key(self, key: str) -> None:
        if key == "q":
            self._quit.set()


class LineScreen:
    """Lines for logs and pipes: each event, each change of state, and the progress when it is written anew."""

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
        told = f"{snapshot.job.state.name}, {phrases.progress(snapshot.job)}"
        if told != self._told:
            self._told = told
            self._say(told)


def screen(session: Session, quit: asyncio.Event) -> Screen:
    if on_a_terminal() and not session.quiet:
        return LiveScreen(session.console, quit)
    return LineScreen(session.say)


async def until_over(session: Session, namespace: str, name: str, interval: float = INTERVAL_SECONDS) -> int:
    """Shows the job until it is over; its outcome as an exit code. Leaving by a key is no failure."""
    job_reader, quit = JobReader(session.api, namespace, name), asyncio.Event()
    snapshot = None
    with screen(session, quit) as shown:
        while not quit.is_set():
            first = snapshot is None
            snapshot = await patiently(job_reader.snapshot)
            shown.show(snapshot)
            if snapshot.job.status.ended:
                if not first:
                    await _final_events(job_reader, shown, quit)
                break
            await pause(quit, interval)
    if snapshot is None:
        return EXIT_OK
    code = snapshot.job.exit_code
    if code is None:
        session.say(f"the job continues; bamboo status {name} --watch shows it again")
        return EXIT_OK
    if not isinstance(shown, LiveScreen):
        session.say(phrases.outcome(snapshot.job))
    return code


async def _final_events(job_reader: JobReader, shown: Screen, quit: asyncio.Event) -> None:
    """The events that came after the end; without them, if the cluster or the job has gone meanwhile."""
    await pause(quit, FINAL_EVENTS_SECONDS)
    with suppress(RemoteError):
        shown.show(await job_reader.snapshot())


async def pause(quit: asyncio.Event, seconds: float) -> None:
    """Shorter if the user wants to leave."""
    try:
        async with asyncio.timeout(seconds):
            await quit.wait()
    except TimeoutError:
        pass
