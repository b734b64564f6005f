"""Published recordings of nodes and prices: every form, and what is refused."""

import pytest

from bamboo.traces.files import parse_trace
from bamboo.traces.summary import nodes_over_time
from bamboo_core.traces.trace import (
    Change,
    NodeTraceError,
    PriceChange,
    Trace,
    make_trace,
    price_series,
    unpriced,
)
from node_trace_kit import OWN


def counts(trace: Trace, zone: str | None = None) -> tuple[tuple[float, int], ...]:
    return nodes_over_time(trace, zone)


@pytest.mark.parametrize(
    ("text", "expected", "duration"),
    [
        ("0,add,a\n60000,add,b\n60000,remove,a\n", ((0.0, 1), (60.0, 1)), 60.0),
        ("60000,remove,old\n120000,add,new\n", ((0.0, 1), (60.0, 0), (120.0, 1)), 120.0),
        ("2021-12-11, 11:11:30, 2\n2021-12-11, 11:12:30, 3\n", ((0.0, 2), (60.0, 3)), 60.0),
        ("2021-12-11,11:11:30,2\n2021-12-11,11:10:30,1\n2021-12-11,11:12:30,1\n", ((0.0, 1),), 60.0),
        ("seconds,nodes\n0,4\n300,4\n600,1\n900,1\n", ((0.0, 4), (600.0, 1)), 900.0),
        ("seconds,x-a,x-b\n0,2,0\n600,1,3\n", ((0.0, 2), (600.0, 4)), 600.0),
        ('"seconds", "nodes"\n"0","4"\n600,"1"\n', ((0.0, 4), (600.0, 1)), 600.0),
    ],
)
def test_every_published_form_of_node_recordings_is_read(
    text: str, expected: tuple[tuple[float, int], ...], duration: float
) -> None:
    trace = parse_trace("t.csv", text)
    assert (counts(trace), trace.duration) == (expected, duration)


def test_zones_are_kept_and_given() -> None:
    trace = parse_trace("t.csv", "seconds,x-a,x-b\n0,2,0\n600,1,3\n")
    assert counts(trace, "x-b") == ((0.0, 0), (600.0, 3))
    assert {change.zone for change in parse_trace("t.csv", "0,add,a\n", zone="here").changes} == {"here"}


def test_prices_without_a_node_are_told_from_nodes_without_a_price() -> None:
    """What the operator records has prices of the pools that say one."""
    nodes = parse_trace("t.csv", "seconds,x-a,x-b\n0,2,1\n").changes

    def priced(*zones: str) -> Trace:
        return make_trace(nodes, [PriceChange(at=0.0, zone=zone, usd_per_hour=1.0) for zone in zones], source="t")

    assert unpriced(priced()) == unpriced(priced("x")) == unpriced(priced("x-a"), all_nodes=True) == ""
    assert unpriced(priced("x-a")).startswith("t: it has prices for x-a, and none for nodes in zone x-b;")
    assert unpriced(priced("y"), all_nodes=True).startswith("t: it has prices for y, and none for nodes in zone x-a;")


def test_where_only_numbers_are_known_the_oldest_node_goes() -> None:
    trace = parse_trace("t.csv", "seconds,nodes\n0,1\n300,2\n600,1\n")
    assert [change.node for change in trace.changes if change.change is Change.REMOVE] == ["node1"]


def test_every_published_form_of_price_recordings_is_read() -> None:
    ticks = parse_trace("t.csv", "zone,tick,usd_per_hour\nus-a,0,1.6703\nus-a,172,1.6729\n")
    assert [(price.at, price.usd_per_hour) for price in ticks.prices] == [(0.0, 1.6703), (172 * 195.0, 1.6729)]
    header = "region,machine_type,spot_usd_per_hour,on_demand_usd_per_hour,fetched\n"
    regions = parse_trace("t.csv", header + "us-east4,a3,24.5,90.0,2025-10-23\n")
    assert price_series(regions, "us-east4-a") == (
        PriceChange(at=0.0, zone="us-east4", usd_per_hour=24.5, on_demand=90.0),
    )
    assert price_series(regions, "us-west1-a") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t line 1: expected milliseconds,add|remove,node"),
        ("\n\nhello\n", "t line 3: expected milliseconds,add|remove,node or another form of a trace; found 'hello'"),
        (f'"{"0" * 200_000}",add,a\n', "t line 1: "),
        ("0,add,a\n5,add,a\n", "t: node a is added, but it is there already, at 0.005 s"),
        ("0,add,a\n5,remove,a\n6,remove,a\n", "t: node a is removed, but it is not there, at 0.006 s"),
        ("0,add,a\n1e300,remove,a\n", "t line 2: the time must be a number from 0 to 1000000000 seconds"),
        ("seconds,nodes\n0,4\n300,-1\n", "t line 3: the count must be from 0 to 100000, not '-1'"),
        ("seconds,nodes\n300,4\n0,4\n", "t line 3: the seconds go back, from 300 to 0"),
        ("seconds,nodes\n0,4,4\n", "t line 2: expected seconds,nodes; found '0,4,4'"),
        ("seconds,a,a\n0,4,4\n", "t line 1: expected the name of a zone, each once, above every column"),
        ("zone,tick,usd_per_hour\na,0,nan\n", "t line 2: the price must be a number from 0 up, not 'nan'"),
        (OWN.replace('"version":1', '"version":2'), "t line 1: expected format 'bamboo-trace' version 1; found"),
        (OWN.replace('"notice":120.0', '"notice":-1'), "t: the notice must be a number from 0"),
        (OWN.replace('"notice"', '"warning"'), "t line 6: Object contains unknown field `warning`"),
        (OWN.replace('"remove"', '"add"'), "t line 6: notice is of a removal, not of add"),
        (OWN.replace('"price":2.0,', ""), "t line 5: expected one of add, remove and price, not none"),
        (OWN.replace("3600.0", "60.0"), "t line 6: the time goes back, from 1800 to 60"),
        (OWN.replace("3600.0", '"soon"'), "t line 6: Expected `float`, got `str`"),
    ],
)
def test_what_is_refused_is_named(text: str, problem: str) -> None:
    with pytest.raises(NodeTraceError) as caught:
        parse_trace("t", text)
    assert str(caught.value).startswith(problem)


def test_a_trace_of_too_many_nodes_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(NodeTraceError, match="at most 1000000 changes"):
        parse_trace("t", "seconds,nodes\n" + "".join(f"{i},{i % 2 * 100_000}\n" for i in range(1000)))
