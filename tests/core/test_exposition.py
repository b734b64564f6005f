"""Pages of metrics, made from the table."""

import pytest

from bamboo_core.metrics import job_catalog, worker_catalog
from bamboo_core.metrics.exposition import Exporter, MetricsPage
from bamboo_core.metrics.histogram import Histogram

JOB = ("default", "tiny")


def test_what_is_not_declared_cannot_be_exported() -> None:
    page = MetricsPage(Exporter.WORKER)
    with pytest.raises(AssertionError, match="not declared for worker"):
        page.add(job_catalog.JOB_STEP, 1, *JOB)
    with pytest.raises(AssertionError, match="has the labels"):
        page.add(worker_catalog.WORKER_STAGES, 1)
    with pytest.raises(AssertionError):
        page.add(worker_catalog.WORKER_STEP_DURATION, 1)
    with pytest.raises(AssertionError):
        page.add_histogram(worker_catalog.WORKER_STEP_DURATION, Histogram((1.0,)))
