"""A local job's status for Prometheus, as one more view. Read at scrape time, so nothing is counted twice."""

import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from bamboo.terminal.view import UserRequest
from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.coordinator.protection import protection
from bamboo_core.job.spec import JobSpec
from bamboo_core.metrics import job_metrics
from bamboo_core.metrics.exposition import Exporter, MetricsPage, MetricsPageCollector
from bamboo_core.metrics.job_catalog import JOB_SAMPLES, RUN_WORKER_MEMORY, RUN_WORKER_SENT
from bamboo_core.metrics.job_metrics import JobKey


class MetricsError(Exception):
    """The port cannot be served; the text is a sentence for the user."""


class MetricsView:
    """Serves /metrics on that port of this machine from start() to stop()."""

    def __init__(self, spec: JobSpec, port: int) -> None:
        self._spec = spec
        self._port = port
        self._status: Status | None = None
        self._stop: Callable[[], None] = lambda: None

    def start(self, request: Callable[[UserRequest], None]) -> None:
        """Raises MetricsError if the port cannot be had."""
        registry = CollectorRegistry()
        registry.register(MetricsPageCollector(Exporter.RUN, self.fill))
        try:
            server, thread = start_http_server(self._port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise MetricsError(f"--metrics-port {self._port}: {os.strerror(error.errno or 0)}") from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop

    def status(self, status: Status) -> None:
        self._status = status

    def emit(self, emit: Emit) -> None:
        pass

    def stop(self) -> None:
        self._stop()

    def fill(self, page: MetricsPage) -> None:
        """Fills the page; called in the thread that is scraped."""
        if (status := self._status) is not None:
            fill(page, (self._spec.namespace, self._spec.name), status, self._spec)


def fill(page: MetricsPage, job: JobKey, status: Status, spec: JobSpec) -> None:
    """Adds all metrics of one job to the page."""
    job_metrics.progress(page, job, status)
    page.add(JOB_SAMPLES, status.trained_samples, *job)
    job_metrics.grid(page, job, status, spec)
    job_metrics.slow(page, job, status)
    found = protection(status, spec)
    job_metrics.protected(page, job, holds=found.holds, reason=found.reason)
    job_metrics.history(page, job, status)
    if (kept := status.checkpoint) is not None:
        step = kept.first if kept.step is None else kept.step
        job_metrics.checkpoint(page, job, step=step, every_steps=kept.every_steps, age=kept.age)
    for worker, memory in status.memory:
        page.add(RUN_WORKER_MEMORY, memory.peak, *job, worker)
    for worker, sent in status.traffic:
        for kind, size in sent.by_kind().items():
            page.add(RUN_WORKER_SENT, size, *job, worker, kind)
