"""The job page of a local run, as one more view."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from bamboo.local.closing import Closing
from bamboo.local.views.summary import Summary
from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.page import document as d
from bamboo_core.page.builder import document, ended
from bamboo_core.page.history import Clock, JobHistory, StepFigures
from bamboo_core.page.server import LocalPage
from bamboo_core.view.job_view import view_of_run

STARTING = d.PageState(name="Starting", tone="idle", sentence="The workers are being started.")
PRICES = "The job's pools have prices, but a run on this machine pays none of them."


class PageView:
    """Keeps what the page shows, and serves it while `serving` is entered."""

    def __init__(self, spec: JobSpec, *, port: int = 0, clock: Clock | None = None) -> None:
        self._spec, self._port = spec, port
        self._record = JobHistory(clock)
        self._status: Status | None = None
        self._ended: d.PageState | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The page's URL. Raises PageError if it cannot be served."""
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

    def document(self) -> d.Document:
        now, spec, live = self._record.now(), self._spec, self._status
        view = view_of_run(spec, live, datetime.fromtimestamp(now, UTC))
        ended = self._ended or (STARTING if live is None else None)
        cost = d.PageCost(sentence=PRICES) if any(p.price_per_hour for p in spec.node_pools) else None
        began = self._record.since
        return document(view, self._record, place="local", began=began, now=now, ended=ended, cost=cost)

    # as a view of the run

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
