"""A trace of known shares."""

import json
from typing import Any

from bamboo.local.trace_summary import (
    parse_trace,
    summarize_trace,
)


def summary(events: list[dict[str, Any]]):
    return summarize_trace(parse_trace(json.dumps(events).encode(), "trace"))
