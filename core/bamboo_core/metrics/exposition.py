"""Declaration and export of metrics. All of Bamboo's own metrics are declared in `catalog`.

Exporters keep plain numbers instead of prometheus-client's counters, and fill a page from them at each scrape: nothing
is counted twice, and a job that is gone has no series any more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from bamboo_core.histogram import Buckets, Histogram


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The declaration of a Prometheus metric: its name, help text, labels and, for a histogram, buckets."""

    name: str  # as queried; a histogram's without _bucket
    help: str
    labels: tuple[str, ...] = ()
    buckets: Buckets = ()  # upper bounds, of a histogram

    @property
    def kind(self) -> MetricKind:
        if self.buckets:
            return MetricKind.HISTOGRAM
        return MetricKind.COUNTER if self.name.endswith("_total") else MetricKind.GAUGE

    def histogram(self, values: Iterable[float] = ()) -> Histogram:
        """Return a histogram of these values with this metric's buckets."""
        assert self.buckets, self.name
        return Histogram.of(self.buckets, values)


Families = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_MAKERS = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


class MetricsPage:
    """The values of an exporter's metrics at one scrape."""

    def __init__(self) -> None:
        self._families: dict[str, Families] = {}

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value of a counter or gauge. labels: values in the order of the metric's labels."""
        family = self._family(metric, labels)
        assert not isinstance(family, HistogramMetricFamily), metric.name
        family.add_metric(labels, value)

    def add_known(self, metric: Metric, value: float | None, *labels: str) -> None:
        """Add a value of a counter or gauge unless it is None."""
        if value is not None:
            self.add(metric, value, *labels)

    def add_histogram(self, metric: Metric, histogram: Histogram, *labels: str) -> None:
        family = self._family(metric, labels)
        assert isinstance(family, HistogramMetricFamily), metric.name
        assert histogram.bounds == metric.buckets, metric.name
        family.add_metric(labels, histogram.cumulative(), histogram.total)

    def families(self) -> Iterable[Family]:
        return self._families.values()

    def _family(self, metric: Metric, labels: tuple[str, ...]) -> Families:
        assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
        if metric.name not in self._families:
            self._families[metric.name] = _MAKERS[metric.kind](metric.name, metric.help, labels=metric.labels)
        return self._families[metric.name]


class MetricsPageCollector(Collector):
    """A registry's collector that fills a new page at every scrape. fill: adds all values; called from any thread."""

    def __init__(self, fill: Callable[[MetricsPage], None]) -> None:
        self._fill = fill

    def collect(self) -> Iterable[Family]:
        page = MetricsPage()
        self._fill(page)
        return page.families()

    def describe(self) -> Iterable[Family]:
        """Return no families. Without this method the registry would collect when the collector is registered."""
        return ()
