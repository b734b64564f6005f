"""A worker's own Prometheus metrics, on a port of its pod. Each request reads the worker's current numbers."""

import logging
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from bamboo_core.complaints import system_reason
from bamboo_core.metrics import catalog as table
from bamboo_core.metrics.exposition import MetricsPage, MetricsPageCollector
from bamboo_trainer.memory.limits import memory_of
from bamboo_trainer.worker.agent import WorkerAgent, by_kind

logger = logging.getLogger(__name__)


def fill(page: MetricsPage, worker: WorkerAgent) -> None:
    """Add the worker's metrics to a page. The metrics server calls this on its own thread while the engine runs."""
    engine, transport = worker.engine, worker.transport
    for what, seconds in worker.spans.seconds().items():
        page.add(table.WORKER_TIME, seconds, what.value)
    for metric, numbers in ((table.WORKER_SENT, transport.sent), (table.WORKER_RESENT, transport.resent)):
        for kind, size in by_kind(numbers).by_kind().items():
            page.add(metric, size, kind)
    page.add(table.WORKER_BROKEN_LINKS, transport.broken)
    if engine is None:
        return
    device = ", ".join(dict.fromkeys(map(str, worker.devices)))
    page.add(table.WORKER_INFO, 1, worker.worker, device, version("bamboo-trainer"))
    page.add_histogram(table.WORKER_STEP_DURATION, engine.step_seconds)
    if (kept := worker.checkpoints) is not None:
        page.add(table.WORKER_CHECKPOINT_BYTES, kept.written)
        page.add(table.WORKER_CHECKPOINT_STALL, kept.stalled)
    for stage, times in engine.owned_times():
        page.add(table.WORKER_MICROBATCH, times.forward, str(stage), "forward")
        page.add(table.WORKER_MICROBATCH, times.backward, str(stage), "backward")
    for stage, seconds in engine.compile_seconds().items():
        page.add(table.WORKER_COMPILE, seconds, str(stage))
    memory = memory_of(worker.devices)
    page.add(table.WORKER_MEMORY_PEAK, memory.peak)
    page.add(table.WORKER_MEMORY_LIMIT, memory.limit)


def serve(worker: WorkerAgent, host: str, port: int) -> None:
    """Serve metrics until the process ends. If the port cannot be opened, log it; training continues without them."""
    registry = CollectorRegistry()
    registry.register(MetricsPageCollector(lambda page: fill(page, worker)))
    ProcessCollector(registry=registry)
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        logger.warning("no metrics: cannot listen on port %d of %s: %s", port, host, system_reason(error))
