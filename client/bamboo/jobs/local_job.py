"""A job that runs on this machine, with its coordinator in the background loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bamboo import background
from bamboo.job_source import JobSource
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
from bamboo.jobs.results import JobProgress, Occurrence, local_progress
from bamboo.local.fork_server import ForkServerError
from bamboo.local.output_folder import WEIGHTS, OutputRefused, only_run_in
from bamboo.local.runner import RunOptions
from bamboo.local.scheduling import Schedule
from bamboo.local.scratch import scratch_folder
from bamboo.local.session import run_with_page
from bamboo.local.views.summary import Summary
from bamboo.terminal.view import ChangeJob, RunView, StopJob, TakeWorker, UserRequest
from bamboo_core.complaints import complaint_of
from bamboo_core.coordinator.events import Emit, Outcome, Status
from bamboo_core.history.files import history_url
from bamboo_core.page.server import PageError

Ask = Callable[[UserRequest], None]
STARTING: Final = "Starting"
SUSPENDED: Final = "Suspended"
MOST_EVENTS: Final = 100_000  # kept here; older ones are in the history
ERRORS: Final[dict[Outcome, type[JobError]]] = {
    Outcome.FAILED: JobFailed,
    Outcome.UNRECOVERABLE: JobUnrecoverable,
    Outcome.INTERRUPTED: JobInterrupted,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Follower:
    """A `RunView` that calls functions at the start of a run, and for each status and event."""

    start: Callable[[Ask], None]
    status: Callable[[Status], None]
    emit: Callable[[Emit], None]

    def stop(self) -> None:
        pass


class LocalJob:
    """A local job: one run after another, with suspensions between them. Its coroutines run in the background loop.

    Without an output folder the job uses a temporary one. It is removed when the job is closed or, if this program is
    killed, when another run begins on this machine.
    """

    def __init__(self, job: JobSource, options: RunOptions, page: int | None) -> None:
        """Create the job. page: the port of its page, 0 for any; None for no page."""
        self._job, self._options, self._port = job, options, page
        self._temporary = ExitStack()
        if options.output is None:
            folder = self._temporary.enter_context(scratch_folder()) / "output"
            self._options = replace(options, output=folder)
        self._ask: Ask | None = None  # passes a request on to the run; None before it has begun
        self._running: asyncio.Task[None] | None = None
        self._events: list[Occurrence] = []
        self._dropped = 0  # number of dropped events, the oldest
        self._news = asyncio.Event()  # set when something happens, and then replaced
        self._known = JobProgress(name=self.name, state=STARTING, steps=job.spec.training.known_steps)
        self._status: Status | None = None  # not in `_known` yet
        self._before = self._known  # progress of earlier runs
        self._workers: tuple[str, ...] = ()
        self._page = ""
        self._stopping = self._suspending = False
        self._ended: Summary | BambooError | None = None

    @property
    def name(self) -> str:
        return self._job.spec.name

    @property
    def output(self) -> Path:
        output = self._options.output
        assert output is not None
        return output

    def start(self) -> None:
        """Start the job's first run, or the next one after a suspension, as a task of the background loop."""
        background.opened(self.close)
        self._ask, self._ended, self._stopping, self._suspending = None, None, False, False
        self._running = asyncio.create_task(self._run())

    async def progress(self) -> JobProgress:
        return self._progress

    @property
    def _progress(self) -> JobProgress:
        """The progress, computed from the newest status on demand, since about 20 statuses come per second."""
        if (status := self._status) is not None:
            now = local_progress(self._job.spec, status, self._page)
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
        """Wait for the next status, event or end; return at once if the run is over."""
        if self._ended is None:
            await self._news.wait()

    async def wait(self, seconds: float | None) -> JobProgress:
        """Wait until the job has ended, even if it is suspended meanwhile, and return its progress. seconds: None waits
        without a limit. Raises InvalidRequest if the job is already suspended, NotInTime after `seconds`, and the
        BambooError with which the job ended if it is not complete.
        """
        if self._progress.state == SUSPENDED:
            raise InvalidRequest(f"{self.name} is suspended; resume() lets it go on")
        try:
            async with asyncio.timeout(seconds):
                while self._ended is None or self._progress.state == SUSPENDED:
                    await self._news.wait()
        except TimeoutError:
            raise NotInTime(f"{self._progress}; it is not over after {seconds:g} s") from None
        if (failure := self._failure()) is not None:
            raise failure
        return self._progress

    async def preempt(self, worker: str | None, *, notice: bool) -> None:
        """Preempt a worker and the others of its node. worker: None for the last one in the grid. Raises InvalidRequest
        if the worker is unknown, or the job does not run or has no grid yet.
        """
        self._check_runs()
        training = [one for pipeline in self._progress.grid for one in pipeline]
        if not training:
            raise InvalidRequest(f"{self.name} does not train yet ({self._progress.state}): no worker can be taken")
        if worker is not None and worker not in self._workers:
            raise InvalidRequest(f"worker {worker[:40]!r}: expected one of {', '.join(sorted(self._workers))}")
        self._check_runs()(TakeWorker(worker or training[-1], notice))

    async def scale(self, workers: int) -> None:
        """Set elastic.maxWorkers. Raises InvalidRequest for a wrong number, a fixed grid or a job that does not run."""
        elastic = self._job.document["spec"].get("elastic")
        if elastic is None:
            raise InvalidRequest(f"{self.name} cannot be scaled: without spec.elastic its grid is fixed")
        job = changed(self._job, "workers", elastic={**elastic, "maxWorkers": workers})
        self._check_runs()(ChangeJob(job.spec))
        self._job = job

    async def stop(self) -> None:
        """Stop the job, after a checkpoint if it keeps any, and wait until it is over."""
        if self._ask is not None and self._ended is None and not self._stopping:
            self._ask(StopJob())
        self._stopping = True  # a second request would end the job at once
        while self._running is not None and self._ended is None:
            await self._news.wait()

    async def interrupted(self) -> None:
        await self.stop()

    async def suspend(self) -> None:
        """Save the job's state and stop it. Raises InvalidRequest if it keeps no checkpoints, or is over or suspended;
        BambooError if it had trained steps, but no checkpoint could be written.
        """
        if self._job.spec.checkpoint is None:
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
        """Resume the job from its newest checkpoint, without planned preemptions and trace. Raises InvalidRequest if
        the job is not suspended.
        """
        if self._progress.state != SUSPENDED:
            raise InvalidRequest(f"{self.name} is not suspended ({self._progress.state})")
        self._options = replace(self._options, preempt=Schedule(), trace=None)
        self._before = self._progress
        self._known = replace(
            self._before, state=STARTING, message="", grid=(), workers=0, samples_per_second=None, eta_seconds=None
        )
        self.start()

    def history_place(self) -> str:
        options = self._options
        return history_url(self._job.spec, options.output, stored=options.store_writable)

    def checkpoint_place(self) -> str:
        """Return the URL of the checkpoints. Raises InvalidRequest if the job keeps none."""
        checkpoint = self._job.spec.checkpoint
        if checkpoint is None or checkpoint.url is None:
            raise InvalidRequest(f"{self.name} keeps no checkpoints (checkpoint.storage says where)")
        return checkpoint.url

    def task_config(self) -> Mapping[str, Any]:
        return self._job.spec.task.config

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

    def _check_runs(self) -> Ask:
        """Return the function that sends requests to the run. Raises InvalidRequest if the job does not run."""
        if self._ask is None or self._ended is not None:
            raise InvalidRequest(f"{self.name} does not run ({self._progress.state})")
        return self._ask

    async def _run(self) -> None:
        job, options = self._job, self._options
        ended: Summary | BambooError = BambooError("the run ended with an error")
        try:
            with only_run_in(options.output):
                ended = await run_with_page(job, options, self._view, port=self._port)
        except (OutputRefused, PageError, ForkServerError) as error:
            ended = BambooError(str(error))
        except OSError as error:
            ended = BambooError(complaint_of(error, "while the job was run"))
        finally:
            self._end(ended)
            self._tell()

    def _view(self, page: str) -> RunView:
        self._page = page
        self._known = replace(self._progress, page=page)
        return _Follower(start=self._began, status=self._took_status, emit=self._took_event)

    def _began(self, ask: Ask) -> None:
        self._ask = ask
        if self._stopping:
            ask(StopJob())

    def _took_status(self, status: Status) -> None:
        self._status, self._workers = status, tuple(worker for worker, _ in status.workers)
        self._tell()

    def _took_event(self, emit: Emit) -> None:
        event = Occurrence(time=time.time(), reason=emit.reason, message=emit.message, warning=emit.warning)
        self._events.append(event)
        late = max(0, len(self._events) - MOST_EVENTS)
        del self._events[:late]
        self._dropped += late
        self._tell()

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
        """Return a new error with the reason why the job ended incomplete; None if it is complete or has not ended."""
        match self._ended:
            case BambooError() as error:
                return type(error)(f"{self.name}: {error}")
            case Summary() as ended if ended.outcome is not Outcome.COMPLETE:
                return ERRORS[ended.outcome](self.name, ended.reason, ended.message, ended.log_tail or "")
        return None

    def _tell(self) -> None:
        """Wake all tasks that wait for a status, an event or the end."""
        self._news.set()
        self._news = asyncio.Event()
