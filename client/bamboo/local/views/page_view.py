"""The web page of a local run, as a `RunView`."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from bamboo.local.closing import Closing
from bamboo.local.views.summary import Summary
from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.page.document import Document, document
from bamboo_core.page.server import LocalPage
from bamboo_core.page.timeline import Clock, JobTimeline, StepFigures
from bamboo_core.view.job_view import ShownState, ended, view_of_run

STARTING = ShownState(name="Starting", tone="idle", sentence="The workers are being started.")


class PageView:
    """A RunView that records status and events for the job page, and serves the page within `serving`."""

    def __init__(self, spec: JobSpec, *, port: int = 0, clock: Clock | None = None) -> None:
        self._spec, self._port = spec, port
        self._record = JobTimeline(clock)
        self._status: Status | None = None
        self._ended: ShownState | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve the page and yield its URL. Raises PageError if it cannot be served."""
        page = LocalPage(self.document, port=self._port)
        url = await page.start()
        try:
            yield url
        finally:
            ending = Closing()
            await ending.wait("while the page's port was closed", page.stop())
            ending.tell()

    def finish(self, summary: Summary) -> None:
        self._ended = ended(summary.outcome, summary.message)

    def document(self) -> Document:
        now, live = self._record.now(), self._status
        view = view_of_run(self._spec, live, datetime.fromtimestamp(now, UTC))
        ended = self._ended or (STARTING if live is None else None)
        return document(view, self._record, place="local", now=now, ended=ended)

    # the interface of a run's view

    def start(self, request: Callable[[UserRequest], None]) -> None:
        pass

    def status(self, status: Status) -> None:
        self._status = status
        figures = StepFigures(status.loss, status.gradient_norm, status.learning_rate)
        self._record.follow(status.step, figures, status.takeovers)

    def emit(self, emit: Emit) -> None:
        self._record.add_event(emit)

    def stop(self) -> None:
        pass
