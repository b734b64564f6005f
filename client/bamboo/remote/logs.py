"""The command `logs`, which prints the logs of one or several workers, once or as they grow."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from bamboo.remote.job_reader import JobDeleted, JobReader
from bamboo.remote.session import Session, Target, patiently
from bamboo.remote.victims import named
from bamboo.terminal.snapshot import RemoteWorker
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError
from bamboo_core.names import EXIT_OK, TRAINER_CONTAINER
from bamboo_core.text import printable

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI, by the worker's number
LOOK_SECONDS = 2.0  # between checks for new workers
MANY_TAIL = 20  # lines of each of several workers, by default
AT_ONCE = 64  # logs read at the same time


async def logs(
    session: Session,
    name: Target,
    wanted: Sequence[str],
    *,
    follow: bool,
    since: int | None,
    tail: int | None,
    previous: bool,
    prefix: bool,
) -> int:
    """Print workers' logs; return the exit code. Raises RemoteError if there is no such worker.

    wanted: workers' names or numbers; empty: all, with `follow` also new ones. since: print only lines of
    the last `since` seconds. previous: only ended workers. tail: last lines of each log; -1: all; None: all of a single
    worker, MANY_TAIL if more may be shown.
    """
    job_reader = JobReader(session.api, *session.of(name))
    snapshot = await job_reader.snapshot()
    if snapshot.missing and not snapshot.workers:
        raise RemoteError(snapshot.missing[0].removeprefix("workers: "))
    chosen = [named(snapshot.job, snapshot.workers, w) for w in wanted] or list(snapshot.workers)
    chosen = [w for w in chosen if not previous or not w.alive]
    if not chosen:
        raise RemoteError(_nothing(snapshot.job.name, previous))
    several = len(chosen) > 1 or (follow and not wanted)
    lines = tail if tail is not None else MANY_TAIL if several else None
    query = {"container": TRAINER_CONTAINER}
    query |= {"sinceSeconds": str(since)} if since is not None else {}
    query |= {"tailLines": str(lines)} if lines is not None and lines >= 0 else {}
    printer = Printer(width=max(len(snapshot.job.short(w.name)) for w in chosen) if several and prefix else 0)
    reader = LogReader(session, job_reader, query, printer)
    if follow and not previous:
        await reader.follow(chosen, newcomers=not wanted)
    else:
        await reader.once([w for w in chosen if w.has_log], chosen)
    return EXIT_OK


def _nothing(job: str, previous: bool) -> str:
    if previous:
        return f"{job} has no workers that have ended and are kept; a failed worker's pod is kept for a while"
    return f"{job} has no workers now"


class Printer:
    """A printer of log lines, coloured on a terminal. width: columns for the workers' names; 0: no names."""

    def __init__(self, width: int) -> None:
        self._width, self._terminal = width, sys.stdout.isatty()

    def line(self, name: str, number: int, text: str) -> None:
        text = printable(text, colours=True) if self._terminal else text
        if self._width:
            before = f"{name:{self._width}} | "
            if self._terminal:
                before = f"\x1b[{COLOURS[number % len(COLOURS)]}m{before}\x1b[0m"
            text = before + text
        print(text, flush=True)


class LogReader:
    """A reader that prints the logs of a job's workers, once or as they grow. query: parameters of the log request."""

    def __init__(self, session: Session, job_reader: JobReader, query: dict[str, str], printer: Printer) -> None:
        self._session, self._job_reader, self._query, self._printer = session, job_reader, query, printer
        self._ended_at: dict[str, datetime] = {}  # when a followed log ended, by the worker's uid

    async def once(self, workers: Sequence[RemoteWorker], asked: Sequence[RemoteWorker]) -> None:
        """Print the logs of `workers` one after the other. Report the workers of `asked` that have not started."""
        for worker in asked:
            if worker not in workers:
                self._tell(worker, f"has not started: {worker.detail or worker.state}")
        for worker in workers:
            await self._read(worker, self._query)

    async def follow(self, workers: Sequence[RemoteWorker], *, newcomers: bool) -> None:
        """Print logs as they grow until these workers end or the job is deleted; reconnect broken connections.

        newcomers: print new workers' logs too, until the job is over.
        """
        known, waiting = {w.uid for w in workers}, list(workers)
        reading: dict[asyncio.Task[None], RemoteWorker] = {}
        try:
            while True:
                for worker in [w for w in waiting if w.has_log][: AT_ONCE - len(reading)]:
                    waiting.remove(worker)
                    reading[asyncio.create_task(self._read(worker, self._following(worker)))] = worker
                ended = await self._some_end(reading)
                try:
                    snapshot = await patiently(self._job_reader.snapshot)
                except JobDeleted:
                    return
                present = {w.uid: w for w in snapshot.workers}
                waiting = [present[w.uid] for w in waiting if w.uid in present]
                broken = [present[w.uid] for w in ended if w.uid in present and present[w.uid].alive]
                waiting += [w for w in broken if w.state != "leaving"]
                if newcomers:
                    waiting += [w for uid, w in present.items() if uid not in known]
                    known |= present.keys()
                over = snapshot.job.status.ended is not None
                to_come = any(w.alive or w.has_log for w in waiting) or (newcomers and not over)
                if not reading and not to_come:
                    return
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def _following(self, worker: RemoteWorker) -> dict[str, str]:
        """Return the query parameters for following a worker's log.

        The first read uses the user's parameters; a read after a broken connection starts at the end of the last one.
        """
        at = self._ended_at.get(worker.uid)
        if at is None:
            return {**self._query, "follow": "true"}
        return {"container": TRAINER_CONTAINER, "follow": "true", "sinceTime": at.strftime("%Y-%m-%dT%H:%M:%SZ")}

    async def _some_end(self, reading: "dict[asyncio.Task[None], RemoteWorker]") -> list[RemoteWorker]:
        """Wait LOOK_SECONDS; remove the reads that ended and return their workers. Raises a failed read's error."""
        began = time.monotonic()
        done: set[asyncio.Task[None]] = set()
        if reading:
            done, _ = await asyncio.wait(reading, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises its error
            self._ended_at[reading[task].uid] = datetime.now(UTC)
        ended = [reading.pop(task) for task in done]
        await asyncio.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - began)))
        return ended

    async def _read(self, worker: RemoteWorker, query: dict[str, str]) -> None:
        namespace, name = self._job_reader.namespace, self._job_reader.name
        short = worker.name.removeprefix(f"{name}-")
        try:
            async with contextlib.aclosing(self._session.api.log(namespace, worker.name, query)) as lines:
                async for line in lines:
                    self._printer.line(short, worker.number, line)
        except ApiError as error:
            if error.status not in (400, 404, 500, 502, 503):
                raise
            self._tell(worker, f"its log cannot be read: {error}")
        except ClusterUnreachable as error:
            if query.get("follow"):
                self._tell(worker, f"its log ended early: {error}")
            else:
                raise

    def _tell(self, worker: RemoteWorker, what: str) -> None:
        print(f"bamboo: {worker.name} {printable(what)}", file=sys.stderr, flush=True)
