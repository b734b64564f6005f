"""A job's status for Prometheus, as one more view. Read at scrape time, so nothing is counted twice."""

import os
from collections import Counter as Count
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from bamboo.events import Emit, Status, WorkerState
from bamboo.local.view import Wish


class MetricsError(Exception):
    """The port cannot be served; the text is a sentence for the user."""


class MetricsView(Collector):
    """Serves /metrics on that port of this machine from start() to stop()."""

    def __init__(self, job: str, port: int) -> None:
        self._job = job
        self._port = port
        self._status: Status | None = None
        self._stop: Callable[[], None] = lambda: None

    def start(self, wish: Callable[[Wish], None]) -> None:
        """Raises MetricsError if the port cannot be had."""
        registry = CollectorRegistry()
        registry.register(self)
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

    def collect(self) -> Iterable[Metric]:
        if self._status is not None:
            yield from families(self._job, self._status)


def families(job: str, status: Status) -> Iterable[Metric]:
    """All metrics of one job."""
    gauges = {
        "bamboo_step": ("Committed steps.", status.step),
        "bamboo_steps": ("Steps that the job asks for.", status.steps),
        "bamboo_epoch": ("Epoch of the current plan.", status.epoch),
        "bamboo_loss": ("Loss of the last committed step.", status.loss),
        "bamboo_step_seconds": ("Median duration of the recent steps.", status.step_seconds),
        "bamboo_samples_per_second": ("Samples trained per second.", status.samples_per_second),
        "bamboo_unprotected_stages": ("Stages that only one worker holds.", len(status.unprotected)),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            gauge = GaugeMetricFamily(name, text, labels=["job"])
            gauge.add_metric([job], value)
            yield gauge
    workers = GaugeMetricFamily("bamboo_workers", "Workers by their part.", labels=["job", "state"])
    counts = Count(state for _, state in status.workers)
    for state in WorkerState:
        workers.add_metric([job, state.value], counts[state])
    yield workers
    memory = GaugeMetricFamily(
        "bamboo_worker_memory_bytes", "What a worker's memory is used for.", labels=["job", "worker", "kind"]
    )
    for worker, account in status.memory:
        for kind, size in account.by_kind().items():
            memory.add_metric([job, worker, kind], size)
    yield memory
    counters = {
        "bamboo_preemptions": ("Workers lost or told to go.", status.preemptions),
        "bamboo_notices": ("Preemptions announced in advance.", status.notices),
        "bamboo_lost_samples": ("Samples of committed steps that did not go into them.", status.lost_samples),
    }
    for name, (text, count) in counters.items():
        counter = CounterMetricFamily(name, text, labels=["job"])
        counter.add_metric([job], count)
        yield counter
    pauses = SummaryMetricFamily("bamboo_takeover_pause_seconds", "Pause of each takeover.", labels=["job"])
    pauses.add_metric([job], len(status.takeovers), sum(t.pause_ms for t in status.takeovers) / 1000)
    yield pauses
