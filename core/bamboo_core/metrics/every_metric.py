"""The table of all exported metrics, from which docs/metrics.md is generated."""

from bamboo_core.metrics import job_catalog, operator_catalog, worker_catalog
from bamboo_core.metrics.exposition import Metric

EVERY_METRIC: tuple[Metric, ...] = tuple(
    value
    for catalog in (job_catalog, operator_catalog, worker_catalog)
    for value in vars(catalog).values()
    if isinstance(value, Metric)
)
