"""A local job inside its process `bamboo.jobs.child`: its requests, its messages, and its end."""

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
    """The message that workers are being started. page: URL of the job's page, "" if there is none."""

    page: str


@dataclass(frozen=True, slots=True)
class CouldNotRun:
    """The message that the run failed to start, with the reason."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """A run of the job. It sends Began, each Status and Emit, and at the end a Summary or CouldNotRun.

    It receives TakeWorker, ChangeJob, and StopJob, which saves the state first; it also stops when its input is closed.
    page: port of the job's page, 0 for any; None for no page.
    """

    job: JobSource
    options: RunOptions
    page: int | None

    def __call__(self, channel: Channel) -> None:
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(SilentErrorsNamed())
        logging.basicConfig(level=logging.ERROR, format="bamboo: %(message)s", handlers=[handler])
        sender = _Sender(channel)
        try:
            with only_run_in(self.options.output):
                ended: Summary | CouldNotRun = loop_signals.run(lambda: self._run(sender, channel))
        except (OutputRefused, PageError, ForkServerError) as error:
            ended = CouldNotRun(str(error))
        except OSError as error:
            ended = CouldNotRun(complaint_of(error, "while the job was run"))
        sender.end(ended)

    async def _run(self, sender: "_Sender", channel: Channel) -> Summary:
        def view(url: str) -> RunView:
            sender.put(Began(url))
            return _SendingView(sender, channel)

        job = self.job
        return await run_with_page(job.spec, job.document, self.options, view, port=self.page)


class _Sender:
    """A thread that sends messages, since the program may read slowly; of waiting statuses only the newest."""

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
        """Send the last message, and wait until all are sent or nobody reads."""
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


class _SendingView:
    """A view that sends the run to the program that started it, and passes its requests on."""

    def __init__(self, sender: _Sender, channel: Channel) -> None:
        self._sender, self._channel = sender, channel

    def start(self, request: Callable[[UserRequest], None]) -> None:
        loop = asyncio.get_running_loop()

        def hear() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                for message in self._channel.messages():
                    loop.call_soon_threadsafe(request, message)
                loop.call_soon_threadsafe(request, StopJob())

        threading.Thread(target=hear, daemon=True).start()

    def status(self, status: Status) -> None:
        self._sender.put_status(status)

    def emit(self, emit: Emit) -> None:
        self._sender.put(emit)

    def stop(self) -> None:
        pass
