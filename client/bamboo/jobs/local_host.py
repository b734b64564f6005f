"""A local job inside its process `bamboo.jobs.child`: its requests, its messages, and its end."""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bamboo import loop_signals
from bamboo.jobs.child import Channel
from bamboo.jobs.errors import BambooError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """A run of the job, which returns its Summary. Before, it sends Began and each Status and Emit.

    It receives TakeWorker, ChangeJob, and StopJob, which saves the state first; it also stops when its input is closed.
    page: port of the job's page, 0 for any; None for no page.
    """

    job: JobSource
    options: RunOptions
    page: int | None

    def __call__(self, channel: Channel) -> Summary:
        """Run the job. Raises BambooError if it could not be started."""
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(SilentErrorsNamed())
        logging.basicConfig(level=logging.ERROR, format="bamboo: %(message)s", handlers=[handler])
        view = _SendingView(channel)
        try:
            with only_run_in(self.options.output):
                return loop_signals.run(lambda: self._run(view))
        except (OutputRefused, PageError, ForkServerError) as error:
            raise BambooError(str(error)) from None
        except OSError as error:
            raise BambooError(complaint_of(error, "while the job was run")) from None
        finally:
            view.close()

    async def _run(self, view: "_SendingView") -> Summary:
        def begun(url: str) -> RunView:
            view.send(Began(url))
            return view

        job = self.job
        return await run_with_page(job.spec, job.document, self.options, begun, port=self.page)


class _SendingView:
    """A view that sends the run to the program that started it, and passes its requests on.

    A thread sends, since the program may read slowly; of waiting statuses it sends only the newest.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._news = threading.Condition()
        self._waiting: list[object] = []
        self._status: Status | None = None
        self._over = False
        self._thread = threading.Thread(target=self._send_waiting, daemon=True)
        self._thread.start()

    def start(self, request: Callable[[UserRequest], None]) -> None:
        loop = asyncio.get_running_loop()

        def hear() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                for message in self._channel.messages():
                    loop.call_soon_threadsafe(request, message)
                loop.call_soon_threadsafe(request, StopJob())

        threading.Thread(target=hear, daemon=True).start()

    def status(self, status: Status) -> None:
        with self._news:
            self._status = status
            self._news.notify()

    def emit(self, emit: Emit) -> None:
        self.send(emit)

    def stop(self) -> None:
        pass

    def send(self, message: object) -> None:
        with self._news:
            self._waiting.append(message)
            self._news.notify()

    def close(self) -> None:
        """Wait until all messages are sent or nobody reads."""
        with self._news:
            self._over = True
            self._news.notify()
        self._thread.join()

    def _send_waiting(self) -> None:
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
