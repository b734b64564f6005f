"""Counts of the calls to the API server: plain numbers, read at each scrape of the metrics."""

from collections import Counter
from dataclasses import dataclass, field

from bamboo_core.metrics.catalog import OPERATOR_API_DURATION
from bamboo_core.metrics.histogram import Histogram


@dataclass(slots=True)
class ApiCallCounts:
    """Calls to the API server. requests: by verb, resource and code. seconds: by verb and resource."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def ended(self, verb: str, path: str, code: str, seconds: float) -> None:
        """Count a call. code: of the answer, or "error" without one."""
        resource = resource_of(path)
        self.requests[verb, resource, code] += 1
        self.seconds.setdefault((verb, resource), OPERATOR_API_DURATION.histogram()).observe(seconds)


def resource_of(path: str) -> str:
    """Return the resource of an API path, without names: pods, bamboojobs/status."""
    parts = path.strip("/").split("/")
    if "namespaces" not in parts[:-2]:
        return parts[-1]
    kind, *rest = parts[parts.index("namespaces") + 2 :]
    return "/".join([kind, *rest[1:2]])
