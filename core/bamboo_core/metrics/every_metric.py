"""Every metric that any part of Bamboo exports: the one table. docs/metrics.md is written from it."""

from bamboo_core.metrics import job_catalog, operator_catalog, worker_catalog
from bamboo_core.metrics.exposition import Metric

EVERY_METRIC: tuple[Metric, ...] = tuple(
    value
    for catalog in (job_catalog, operator_catalog, worker_catalog)
    for value in vars(catalog).values()
    if isinstance(value, Metric)
)
