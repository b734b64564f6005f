"""A job that runs on this machine, in a process beside this program, as the loop in the background sees it."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bamboo.jobs.child_process import ChildDied, ChildProcess, print_error
from bamboo.jobs.errors import (
    BambooError,
    InvalidRequest,
    JobError,
    JobFailed,
    JobInterrupted,
    JobUnrecoverable,
    NotInTime,
)
from bamboo.jobs.here import changed
from bamboo.jobs.local_host import Began, CouldNotRun, HostedRun
from bamboo.jobs.results import HistoryRows, JobProgress, Occurrence, local_progress
from bamboo.local.job_source import JobSource
from bamboo.local.output_folder import WEIGHTS
from bamboo.local.runner import RunOptions
from bamboo.local.views.summary import Summary
from bamboo.terminal.view import ChangeJob, StopJob, TakeWorker
from bamboo_core.coordinator.events import Emit, Outcome, Status
from bamboo_core.history.files import find
from bamboo_core.history.place import history_url
from bamboo_core.history.records import HistoryError
from bamboo_core.storage.errors import StorageError

STARTING: Final = "Starting"
SUSPENDED: Final = "Suspended"
MOST_EVENTS: Final = 100_000  # that are kept; older ones are in the history
ERRORS: Final[dict[Outcome, type[JobError]]] = {
    Outcome.FAILED: JobFailed,
    Outcome.UNRECOVERABLE: JobUnrecoverable,
    Outcome.INTERRUPTED: JobInterrupted,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunRequest:
    """How a job is to run here. options: as `bamboo run` has them, with an output or None. page: None for no page."""

    job: JobSource
    options: RunOptions
    page: int | None


class LocalJob:
    """The job, over as many runs as it is suspended and resumed. All methods are called in the loop.

    Its output folder is a temporary one, if none is asked for; `forget` removes that.
    """

    def __init__(self, wanted: LocalRunRequest) -> None:
        self._wanted = wanted
        self._temporary: Path | None = None
        if wanted.options.output is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="bamboo-"))
            self._wanted = replace(wanted, options=replace(wanted.options, output=self._temporary))
        self._child: ChildProcess | None = None
        self._running: asyncio.Task[None] | None = None
        self._events: list[Occurrence] = []
        self._news = asyncio.Condition()
        self._progress = JobProgress(name=self.name, state=STARTING, steps=wanted.job.spec.training.known_steps)
        self._page = ""
        self._suspending = False
        self._ended: Summary | BambooError | None = None

    @property
    def name(self) -> str:
        return self._wanted.job.spec.name

    @property
    def output(self) -> Path:
        output = self._wanted.options.output
        assert output is not None
        return output

    async def start(self) -> None:
        """Begins a run. Raises OSError if no process can be started."""
        work = HostedRun(job=self._wanted.job, options=self._wanted.options, page=self._wanted.page)
        self._child, self._ended, self._suspending = await ChildProcess.start(work, print_error), None, False
        self._running = asyncio.create_task(self._run(self._child))

    async def progress(self) -> JobProgress:
        return self._progress

    async def events(self, *, follow: bool) -> AsyncIterator[Occurrence]:
        """What happened so far; with follow also what does until the job is over or suspended."""
        told = 0
        while True:
            for event in self._events[told:]:
                told += 1
                yield event
            if not follow or self._ended is not None:
                return
            async with self._news:
                await self._news.wait()

    async def wait(self, seconds: float | None) -> JobProgress:
        """The progress at the end of a complete job. Raises JobError or another BambooError if it ended otherwise."""
        if self._progress.state == SUSPENDED:
            raise InvalidRequest(f"{self.name} is suspended; resume() lets it go on")
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self._ended is not None)
        except TimeoutError:
            raise NotInTime(f"{self._progress}; it is not over after {seconds:g} s") from None
        if isinstance(self._ended, BambooError):
            raise self._ended
        return self._progress

    async def preempt(self, worker: str | None, *, notice: bool) -> None:
        """Takes a worker away, or one of the grid if none is named."""
        training = [one for pipeline in self._progress.grid for one in pipeline]
        if not training:
            raise InvalidRequest(f"{self.name} does not train yet ({self._progress.state}): no worker can be taken")
        await self._send(TakeWorker(worker or training[-1], notice))

    async def scale(self, pipelines: int) -> None:
        """Changes how many pipelines there should be. Raises InvalidRequest."""
        topology = {**(self._wanted.job.document["spec"].get("topology") or {}), "pipelines": pipelines}
        job = changed(self._wanted.job, "pipelines", topology=topology)
        await self._send(ChangeJob(job.spec))
        self._wanted = replace(self._wanted, job=job)

    async def stop(self) -> None:
        """Stops it, after its state is kept if it keeps checkpoints, and waits until it is over."""
        if self._ended is None:
            await self._send(StopJob())
            await self._until_ended()

    async def interrupted(self) -> None:
        await self.stop()

    async def suspend(self) -> None:
        """Keeps its state and stops it. Raises InvalidRequest if it keeps no checkpoints."""
        if self._wanted.job.spec.checkpoint is None:
            raise InvalidRequest(
                f"{self.name} cannot be suspended: it keeps no checkpoints (checkpoint.storage says where)"
            )
        if self._ended is not None:
            raise InvalidRequest(f"{self.name} is over or suspended ({self._progress.state})")
        self._suspending = True
        await self.stop()

    async def resume(self) -> None:
        """Lets a suspended job go on from its newest checkpoint."""
        if self._progress.state != SUSPENDED:
            raise InvalidRequest(f"{self.name} is not suspended ({self._progress.state})")
        part = {**self._wanted.job.document["spec"]["checkpoint"], "resume": "Latest"}
        self._wanted = replace(self._wanted, job=changed(self._wanted.job, "checkpoint", checkpoint=part))
        before = self._progress
        self._progress = JobProgress(name=self.name, state=STARTING, step=before.step, steps=before.steps)
        await self.start()

    async def history(self) -> HistoryRows:
        """Raises InvalidRequest if it keeps none yet."""
        options = self._wanted.options
        url = history_url(self._wanted.job.spec, options.output, stored=options.store_writable)
        try:
            return HistoryRows(await asyncio.to_thread(lambda: find(url).read_all()))
        except (HistoryError, StorageError, ValueError) as error:
            raise InvalidRequest(f"{self.name}: {error}") from None

    def checkpoint_place(self) -> str:
        """The URL of its checkpoints. Raises InvalidRequest if it keeps none."""
        checkpoint = self._wanted.job.spec.checkpoint
        if checkpoint is None or checkpoint.storage.uri is None:
            raise InvalidRequest(f"{self.name} keeps no checkpoints (checkpoint.storage says where)")
        return checkpoint.storage.uri

    def weights_place(self) -> str:
        """The folder of its weights. Raises InvalidRequest if there are none."""
        folder = self.output / WEIGHTS
        if not folder.is_dir():
            raise InvalidRequest(f"{self.name} has no weights yet ({self._progress.state}); they are there at its end")
        return str(folder)

    async def close(self) -> None:
        """Stops it, if it runs, and removes a temporary output."""
        with suppress(BambooError):
            await self.stop()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)  # here: when the interpreter ends there are no threads

    # the run

    async def _send(self, request: object) -> None:
        if self._child is None or self._ended is not None:
            raise InvalidRequest(f"{self.name} does not run ({self._progress.state})")
        await self._child.send(request)

    async def _until_ended(self) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._ended is not None)

    async def _run(self, child: ChildProcess) -> None:
        ended: Summary | CouldNotRun | None = None
        try:
            async for message in child.messages():
                if isinstance(message, Summary | CouldNotRun):
                    ended = message
                else:
                    self._take(message)
                    await self._tell()
        finally:
            if ended is None:
                child.terminate()
            tail = await child.close()
            self._end(ended, tail)
            await self._tell()

    def _take(self, message: Any) -> None:
        match message:
            case Began(page):
                self._page = page
                self._progress = replace(self._progress, page=page)
            case Status():
                self._progress = local_progress(self._wanted.job.spec, message, self._page)
            case Emit():
                event = Occurrence(
                    time=time.time(), reason=message.reason, message=message.message, warning=message.warning
                )
                self._events.append(event)
                del self._events[:-MOST_EVENTS]

    def _end(self, ended: Summary | CouldNotRun | None, tail: str) -> None:
        state, message = "Failed", ""
        match ended:
            case None:
                why = f"{self.name}: the process that ran it ended without a word"
                self._ended = ChildDied(f"{why}, perhaps for want of memory" + (f"\n\n{tail}" if tail else ""))
            case CouldNotRun():
                self._ended = BambooError(f"{self.name}: {ended.message}")
            case Summary(outcome=Outcome.COMPLETE):
                self._ended, state = ended, ended.outcome.value
            case Summary():
                suspended = self._suspending and ended.outcome is Outcome.INTERRUPTED
                state = SUSPENDED if suspended else ended.outcome.value
                message = f"{ended.reason}: {ended.message}"
                self._ended = ERRORS[ended.outcome](self.name, ended.reason, ended.message, ended.log_tail or "")
        self._progress = replace(self._progress, state=state, message=message, page="")

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
