"""Our own form of traces keeps everything."""

from bamboo.traces.files import parse_trace
from bamboo.traces.json_lines import to_json_lines
from bamboo.traces.trace import (
    Change,
    NodeChange,
    price_series,
)
from node_trace_kit import OWN


def test_our_own_form_keeps_everything() -> None:
    trace = parse_trace("t.jsonl", OWN)
    assert trace.changes[-1] == NodeChange(at=3600.0, change=Change.REMOVE, node="n2", zone="east-b", notice=120.0)
    assert [price.usd_per_hour for price in price_series(trace, "east-a")] == [1.0]
    assert [price.usd_per_hour for price in price_series(trace, "east-b")] == [2.0]
    assert parse_trace("t.jsonl", "".join(to_json_lines(trace))) == trace
