"""Traces of nodes: every form that is read, what is refused, summaries, and what is made up."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.traces.files import parse_trace, read_trace, read_traces
from bamboo.traces.generate import Generation, Pattern, generate
from bamboo.traces.json_lines import to_json_lines
from bamboo.traces.summary import nodes_over_time, removals_by_hour, summarize
from bamboo.traces.trace import (
    Change,
    NodeChange,
    NodeTraceError,
    PriceChange,
    Trace,
    make_trace,
    price_series,
    removal_times,
)

OWN = """\
{"format":"bamboo-trace","version":1,"duration":7200.0,"source":"made for a test"}
{"at":0.0,"price":1.0,"zone":"east","onDemand":3.0}
{"at":0.0,"add":"n1","zone":"east-a"}
{"at":0.0,"add":"n2","zone":"east-b"}
{"at":1800.0,"price":2.0,"zone":"east-b"}
{"at":3600.0,"remove":"n2","zone":"east-b","notice":120.0}
"""


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


def test_our_own_form_keeps_everything() -> None:
    trace = parse_trace("t.jsonl", OWN)
    assert trace.changes[-1] == NodeChange(at=3600.0, change=Change.REMOVE, node="n2", zone="east-b", notice=120.0)
    assert [price.usd_per_hour for price in price_series(trace, "east-a")] == [1.0]
    assert [price.usd_per_hour for price in price_series(trace, "east-b")] == [2.0]
    assert parse_trace("t.jsonl", "".join(to_json_lines(trace))) == trace


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t line 1: expected milliseconds,add|remove,node"),
        ("\n\nhello\n", "t line 3: expected milliseconds,add|remove,node or another form of a trace; found 'hello'"),
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


def test_files_that_cannot_be_read_and_several_files(tmp_path: Path) -> None:
    with pytest.raises(NodeTraceError, match="cannot read /no/such: No such file"):
        read_trace("/no/such")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(NodeTraceError, match="it is not UTF-8 text"):
        read_trace(str(tmp_path / "b"))
    (tmp_path / "nodes").write_text("seconds,x-a\n0,2\n3600,2\n")
    (tmp_path / "prices").write_text("zone,tick,usd_per_hour\nx,0,0.5\n")
    assert summarize(read_traces([str(tmp_path / "nodes"), str(tmp_path / "prices")])).usd_per_hour == 0.5


def test_a_summary_counts_removals_lifetimes_and_node_hours() -> None:
    trace = make_trace(
        [NodeChange(at=0.0, change=Change.ADD, node=name) for name in "abcd"]
        + [NodeChange(at=3600.0, change=Change.REMOVE, node=name) for name in "ab"]
        + [NodeChange(at=5400.0, change=Change.REMOVE, node="c")],
        duration=7200.0,
    )
    found = summarize(trace)
    assert (found.added, found.removed, found.peak) == (4, 3, 4)
    assert found.node_hours == 4 + 1 + 0.5
    assert found.mean_nodes == 5.5 / 2
    assert (found.removals_per_hour, found.removal_instants, found.largest_batch) == (1.5, 2, 2)
    assert found.removals_per_node_hour == 3 / 5.5
    assert (found.mean_lifetime, found.median_lifetime) == (4200.0, 3600.0)
    assert (found.usd_per_hour, found.zones) == (None, ())
    assert removals_by_hour(trace) == (0, 3)
    assert summarize(make_trace()).mean_nodes == 0


def test_the_mean_price_is_over_time_and_nodes() -> None:
    """n1 two hours at 1; n2 half an hour at what was first known of its zone, then half an hour at 2."""
    assert summarize(parse_trace("t", OWN)).usd_per_hour == pytest.approx((2 * 1 + 1 * 2) / 3)


@pytest.mark.parametrize("pattern", list(Pattern))
def test_what_is_generated_follows_its_seed_and_its_rate(pattern: Pattern) -> None:
    wanted = Generation(
        pattern=pattern, nodes=60, hours=400, removal=0.1, addition=0.9, zones=("a", "b", "c"), notice=30.0
    )
    trace = generate(wanted, 1)
    assert trace == generate(wanted, 1) != generate(wanted, 2)
    found = summarize(trace)
    assert (found.zones, found.duration, found.peak) == (("a", "b", "c"), 400 * 3600.0, 60)
    assert 0.08 < found.removals_per_node_hour < 0.13
    assert {change.notice for change in trace.changes if change.change is Change.REMOVE} == {30.0}
    assert (found.largest_batch >= 10) is (pattern is Pattern.ZONES)


def test_diurnal_removals_have_their_peak() -> None:
    trace = generate(Generation(pattern=Pattern.DIURNAL, nodes=100, hours=480, addition=1.0, peak_hour=6.0), 3)
    hours = [math.floor(at / 3600) % 24 for at in removal_times(trace)]
    assert sum(3 <= hour < 9 for hour in hours) > 5 * sum(15 <= hour < 21 for hour in hours)


def test_prices_move_about_their_mean() -> None:
    trace = generate(Generation(hours=2400, price=2.0, volatility=0.1), 5)
    prices = [price.usd_per_hour for price in trace.prices]
    assert len(set(prices)) > 100
    assert 1.8 < sum(prices) / len(prices) < 2.2
    assert 1.0 < min(prices) < max(prices) < 4.0
    assert len(generate(Generation(price=2.0), 5).prices) == 1


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Generation(nodes=0), "--nodes must be from 1 to 100000, not 0"),
        (Generation(removal=1.5), "--removal must be from 0 to 1, not 1.5"),
        (Generation(hours=math.nan), "--hours must be from"),
        (Generation(zones=("a", "a")), "--zones must name at least one zone, and each once"),
        (Generation(nodes=100_000, hours=1000), "--nodes times --hours must be at most 5000000"),
        (Generation(price=-1.0), "the price must be a number from 0"),
    ],
)
def test_what_cannot_be_generated_is_named(wanted: Generation, problem: str) -> None:
    with pytest.raises(NodeTraceError) as caught:
        generate(wanted, 1)
    assert str(caught.value).startswith(problem)


def test_a_generated_trace_is_converted_and_shown_without_loss(tmp_path: Path) -> None:
    run, made, again = CliRunner().invoke, str(tmp_path / "made.jsonl"), str(tmp_path / "again.jsonl")
    done = run(app, ["traces", "generate", "zones", "--zones", "a,b", "--price", "0.9", "--seed", "4", "-o", made])
    assert (done.exit_code, done.output) == (0, "")
    assert run(app, ["traces", "convert", made, "-o", again]).exit_code == 0
    assert Path(again).read_text() == Path(made).read_text()
    shown = json.loads(run(app, ["traces", "show", made, "--output", "json"]).stdout)
    assert (shown["zones"], len(shown["removals_by_hour"])) == (["a", "b"], 24)
    assert shown["usd_per_hour"] == pytest.approx(0.9)
    text = run(app, ["traces", "show", made]).stdout
    assert "generated: zones, seed 4" in text
    assert "0.9000 USD per node hour" in text
    wrong = run(app, ["traces", "show", str(tmp_path)])
    assert (wrong.exit_code, wrong.stderr) == (2, f"bamboo: cannot read {tmp_path}: Is a directory\n")
    assert run(app, ["traces", "generate", "hourly", "--nodes", "0"]).exit_code == 2
    unwritten = run(app, ["traces", "convert", made, "-o", str(tmp_path)])
    assert (unwritten.exit_code, unwritten.stderr) == (1, f"bamboo: cannot write {tmp_path}: Is a directory\n")
