"""A local job in the process that `bamboo.jobs.child` is: what it is asked, what it tells, and how it ends."""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bamboo import loop_signals
from bamboo.jobs.channel import Channel
from bamboo.local.fork_server import ForkServerError
from bamboo.local.job_source import JobSource
from bamboo.local.output_folder import OutputRefused, only_run_in
from bamboo.local.runner import RunOptions
from bamboo.local.session import run_with_page
from bamboo.local.views.summary import Summary
from bamboo.terminal.view import RunView, StopJob, UserRequest
from bamboo_core.complaints import SilentErrorsNamed, complaint_of
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.page.server import PageError


@dataclass(frozen=True, slots=True)
class Began:
    """Workers are being started. page: the URL of the job's page, "" if there is none."""

    page: str


@dataclass(frozen=True, slots=True)
class CouldNotRun:
    """There was no run, for that reason."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """Runs the job. It sends Began, each Status and Emit, and at the end a Summary, or CouldNotRun.

    It is sent TakeWorker and ChangeJob, and StopJob, which keeps the state first; when nothing more can be sent to it,
    it stops as well. page: its port, 0 for any; None for no page.
    """

    job: JobSource
    options: RunOptions
    page: int | None

    def __call__(self, channel: Channel) -> None:
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(SilentErrorsNamed())
        logging.basicConfig(level=logging.ERROR, format="bamboo: %(message)s", handlers=[handler])
        told = _Telling(channel)
        try:
            with only_run_in(self.options.output):
                ended: Summary | CouldNotRun = loop_signals.run(lambda: self._run(told, channel))
        except (OutputRefused, PageError, ForkServerError) as error:
            ended = CouldNotRun(str(error))
        except OSError as error:
            ended = CouldNotRun(complaint_of(error, "while the job was run"))
        told.end(ended)

    async def _run(self, told: "_Telling", channel: Channel) -> Summary:
        def view(url: str) -> RunView:
            told.put(Began(url))
            return _TellingView(told, channel)

        job = self.job
        return await run_with_page(job.spec, job.document, self.options, view, port=self.page)


class _Telling:
    """Sends what is told from a thread of its own, since the program may take its time to read; of statuses that wait
    only the newest.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._news = threading.Condition()
        self._waiting: list[object] = []
        self._status: Status | None = None
        self._over = False
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        with self._news:
            self._waiting.append(message)
            self._news.notify()

    def put_status(self, status: Status) -> None:
        with self._news:
            self._status = status
            self._news.notify()

    def end(self, message: object) -> None:
        """Sends that last, and waits until all is sent or nobody reads."""
        with self._news:
            self._waiting.append(message)
            self._over = True
            self._news.notify()
        self._thread.join()

    def _send(self) -> None:
        over = False
        while not over:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._status or self._over)
                status, self._status = self._status, None
                waiting, self._waiting, over = self._waiting, [], self._over
            try:
                for message in (*((status,) if status else ()), *waiting):
                    self._channel.send(message)
            except BrokenPipeError:
                return


class _TellingView:
    """A view of the run for the program that has started it, and its requests."""

    def __init__(self, told: _Telling, channel: Channel) -> None:
        self._told, self._channel = told, channel

    def start(self, request: Callable[[UserRequest], None]) -> None:
        loop = asyncio.get_running_loop()

        def hear() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                for message in self._channel.messages():
                    loop.call_soon_threadsafe(request, message)
                loop.call_soon_threadsafe(request, StopJob())

        threading.Thread(target=hear, daemon=True).start()

    def status(self, status: Status) -> None:
        self._told.put_status(status)

    def emit(self, emit: Emit) -> None:
        self._told.put(emit)

    def stop(self) -> None:
        pass
