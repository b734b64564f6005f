"""A job that runs on this machine, in its own process, in the background loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bamboo.jobs import background
from bamboo.jobs.child_process import ChildProcess
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
from bamboo.jobs.local_host import Began, HostedRun
from bamboo.jobs.results import JobProgress, Occurrence, local_progress
from bamboo.local.job_source import JobSource
from bamboo.local.output_folder import WEIGHTS
from bamboo.local.runner import RunOptions
from bamboo.local.scratch import scratch_folder
from bamboo.local.views.summary import Summary
from bamboo.preemption.scheduling import Schedule
from bamboo.terminal.view import ChangeJob, StopJob, TakeWorker
from bamboo_core.complaints import said_by
from bamboo_core.coordinator.events import Emit, Outcome, Status
from bamboo_core.history.place import history_url

STARTING: Final = "Starting"
SUSPENDED: Final = "Suspended"
MOST_EVENTS: Final = 100_000  # kept here; older ones are in the history
ERRORS: Final[dict[Outcome, type[JobError]]] = {
    Outcome.FAILED: JobFailed,
    Outcome.UNRECOVERABLE: JobUnrecoverable,
    Outcome.INTERRUPTED: JobInterrupted,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunRequest:
    """A request to run a job here. options: as of `bamboo run`. page: its port, 0 for any; None for no page."""

    job: JobSource
    options: RunOptions
    page: int | None


class LocalJob:
    """A job over all its runs between suspensions. All methods are called in the loop.

    Without an output folder it uses a temporary one, which is removed when it is closed or, if this program is killed,
    when another run begins on this machine.
    """

    def __init__(self, wanted: LocalRunRequest) -> None:
        self._wanted = wanted
        self._temporary = ExitStack()
        if wanted.options.output is None:
            folder = self._temporary.enter_context(scratch_folder()) / "output"
            self._wanted = replace(wanted, options=replace(wanted.options, output=folder))
        self._child: ChildProcess | None = None
        self._running: asyncio.Task[None] | None = None
        self._events: list[Occurrence] = []
        self._dropped = 0  # number of dropped events, the oldest
        self._news = asyncio.Condition()
        self._known = JobProgress(name=self.name, state=STARTING, steps=wanted.job.spec.training.known_steps)
        self._status: Status | None = None  # not in `_known` yet
        self._before = self._known  # progress of earlier runs
        self._workers: tuple[str, ...] = ()
        self._page = ""
        self._stopping = self._suspending = False
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
        """Start a run. Raises BambooError if no process can be started."""
        work = HostedRun(job=self._wanted.job, options=self._wanted.options, page=self._wanted.page)
        background.opened(self.close)
        try:
            self._child = await ChildProcess.start(work)
        except OSError as error:
            raise BambooError(f"{self.name}: no process can be started: {said_by(error)}") from None
        self._ended, self._stopping, self._suspending = None, False, False
        self._running = asyncio.create_task(self._run(self._child))

    async def progress(self) -> JobProgress:
        return self._progress

    @property
    def _progress(self) -> JobProgress:
        """Return the progress, computed from the newest status on demand, since about twenty come per second."""
        if (status := self._status) is not None:
            now = local_progress(self._wanted.job.spec, status, self._page)
            self._known = replace(
                now,
                preemptions=now.preemptions + self._before.preemptions,
                takeovers=now.takeovers + self._before.takeovers,
                lost_samples=(now.lost_samples or 0) + (self._before.lost_samples or 0),
            )
            self._status = None
        return self._known

    def feed(self) -> Callable[[], Coroutine[Any, Any, list[Occurrence]]]:
        seen = 0

        async def new() -> list[Occurrence]:
            nonlocal seen
            events = self._events[max(0, seen - self._dropped) :]
            seen = self._dropped + len(self._events)
            return events

        return new

    async def over(self) -> bool:
        return self._ended is not None

    async def moment(self) -> None:
        """Wait for something to happen."""
        async with self._news:
            if self._ended is None:
                await self._news.wait()

    async def wait(self, seconds: float | None) -> JobProgress:
        """Return the progress of the complete job, even if it is suspended meanwhile. Raises BambooError."""
        if self._progress.state == SUSPENDED:
            raise InvalidRequest(f"{self.name} is suspended; resume() lets it go on")
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self._ended is not None and self._progress.state != SUSPENDED)
        except TimeoutError:
            raise NotInTime(f"{self._progress}; it is not over after {seconds:g} s") from None
        if (failure := self._failure()) is not None:
            raise failure
        return self._progress

    async def preempt(self, worker: str | None, *, notice: bool) -> None:
        """Take a worker away, or one of the grid if none is named."""
        self._check_runs()
        training = [one for pipeline in self._progress.grid for one in pipeline]
        if not training:
            raise InvalidRequest(f"{self.name} does not train yet ({self._progress.state}): no worker can be taken")
        if worker is not None and worker not in self._workers:
            raise InvalidRequest(f"worker {worker[:40]!r}: expected one of {', '.join(sorted(self._workers))}")
        await self._send(TakeWorker(worker or training[-1], notice))

    async def scale(self, workers: int) -> None:
        """Change how many workers may run stages. Raises InvalidRequest if the job's grid is fixed."""
        elastic = self._wanted.job.document["spec"].get("elastic")
        if elastic is None:
            raise InvalidRequest(f"{self.name} cannot be scaled: without spec.elastic its grid is fixed")
        job = changed(self._wanted.job, "workers", elastic={**elastic, "maxWorkers": workers})
        await self._send(ChangeJob(job.spec))
        self._wanted = replace(self._wanted, job=job)

    async def stop(self) -> None:
        """Stop the job, after a checkpoint if it keeps any, and wait until it is over."""
        if self._child is None:
            return
        if self._ended is None and not self._stopping:
            self._stopping = True  # a second request would end the job at once
            await self._child.send(StopJob())
        async with self._news:
            await self._news.wait_for(lambda: self._ended is not None)

    async def interrupted(self) -> None:
        await self.stop()

    async def suspend(self) -> None:
        """Save the job's state and stop it. Raises InvalidRequest if it keeps no checkpoints, or is over."""
        if self._wanted.job.spec.checkpoint is None:
            raise InvalidRequest(
                f"{self.name} cannot be suspended: it keeps no checkpoints (checkpoint.storage says where)"
            )
        if self._ended is not None:
            raise InvalidRequest(f"{self.name} is over or suspended ({self._progress.state})")
        self._suspending = True
        await self.stop()
        if self._progress.state != SUSPENDED:
            raise InvalidRequest(f"{self._progress}; it was over before it could be suspended")
        if isinstance(self._ended, Summary) and self._ended.status.step and not self._ended.kept_step:
            raise BambooError(f"{self.name} is suspended, and no checkpoint could be written: events() say why")

    async def resume(self) -> None:
        """Resume the job from its newest checkpoint, without further planned preemptions."""
        if self._progress.state != SUSPENDED:
            raise InvalidRequest(f"{self.name} is not suspended ({self._progress.state})")
        before, wanted = self._progress, self._wanted
        options = replace(wanted.options, preempt=Schedule(), trace=None, profile=None)
        self._wanted = replace(wanted, options=options)
        self._before = before
        self._known = JobProgress(
            name=self.name,
            state=STARTING,
            step=before.step,
            steps=before.steps,
            preemptions=before.preemptions,
            takeovers=before.takeovers,
            lost_samples=before.lost_samples,
        )
        try:
            await self.start()
        except BambooError:
            self._known = before
            raise

    def history_place(self) -> str:
        options = self._wanted.options
        return history_url(self._wanted.job.spec, options.output, stored=options.store_writable)

    def checkpoint_place(self) -> str:
        """Return the URL of the checkpoints. Raises InvalidRequest if the job keeps none."""
        checkpoint = self._wanted.job.spec.checkpoint
        if checkpoint is None or checkpoint.url is None:
            raise InvalidRequest(f"{self.name} keeps no checkpoints (checkpoint.storage says where)")
        return checkpoint.url

    def task_config(self) -> Mapping[str, Any]:
        return self._wanted.job.spec.task.config

    def weights_place(self) -> str:
        """Return the folder of the weights. Raises InvalidRequest if there are none."""
        folder = self.output / WEIGHTS
        if not any(folder.glob("*.safetensors")):
            state = self._progress.state
            raise InvalidRequest(f"{self.name} has no weights ({state}); they are there from its end until close()")
        return str(folder)

    async def close(self) -> None:
        """Stop the job if it runs, and remove a temporary output."""
        with suppress(BambooError):
            await self.stop()
        self._temporary.close()
        background.closed(self.close)

    # the run

    async def _send(self, request: object) -> None:
        await self._check_runs().send(request)

    def _check_runs(self) -> ChildProcess:
        """Return the process that runs the job. Raises InvalidRequest if there is none."""
        if self._child is None or self._ended is not None:
            raise InvalidRequest(f"{self.name} does not run ({self._progress.state})")
        return self._child

    async def _run(self, child: ChildProcess) -> None:
        ended: Summary | BambooError = BambooError("its messages could not be read")
        try:
            ended = await child.result(self._take)
        except BambooError as error:
            ended = error
        finally:
            self._end(ended)
            await self._tell()

    async def _take(self, message: Any) -> None:
        match message:
            case Began(page):
                self._page = page
                self._known = replace(self._progress, page=page)
            case Status():
                self._status, self._workers = message, tuple(worker for worker, _ in message.workers)
            case Emit(reason, text, warning):
                self._events.append(Occurrence(time=time.time(), reason=reason, message=text, warning=warning))
                late = max(0, len(self._events) - MOST_EVENTS)
                del self._events[:late]
                self._dropped += late
        await self._tell()

    def _end(self, ended: Summary | BambooError) -> None:
        self._ended = ended
        state, message = "Failed", ""
        if isinstance(ended, Summary):
            suspended = self._suspending and ended.outcome is Outcome.INTERRUPTED
            state = SUSPENDED if suspended else ended.outcome.value
            message = "" if ended.outcome is Outcome.COMPLETE else f"{ended.reason}: {ended.message}"
            if suspended:
                message = f"the state of step {ended.kept_step} is kept" if ended.kept_step else "no state is kept"
        self._known = replace(self._progress, state=state, message=message, page="")

    def _failure(self) -> BambooError | None:
        """Return a new error that says why the job is not complete, or None."""
        match self._ended:
            case BambooError() as error:
                return type(error)(f"{self.name}: {error}")
            case Summary() as ended if ended.outcome is not Outcome.COMPLETE:
                return ERRORS[ended.outcome](self.name, ended.reason, ended.message, ended.log_tail or "")
        return None

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
