"""Recordings in files: JSON lines and tables, several files, refusals."""

import gzip
import os
from pathlib import Path

import pytest

from bamboo.traces import files
from bamboo.traces.files import parse_trace, read_nodes, read_trace
from bamboo.traces.summary import nodes_over_time, summarize
from bamboo.traces.trace import NodeTraceError, PriceChange, Trace, make_trace, unpriced
from node_trace_kit import OWN, recording


def test_files_that_cannot_be_read_and_several_files(tmp_path: Path) -> None:
    with pytest.raises(NodeTraceError, match="cannot read /no/such: No such file"):
        read_trace("/no/such")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(NodeTraceError, match="it is not UTF-8 text"):
        read_trace(str(tmp_path / "b"))
    (tmp_path / "nodes").write_text(recording(3600, {"x-a": 2}))
    (tmp_path / "prices").write_text(recording(1, {}, {"at": 0, "zone": "x", "price": 0.5}))
    assert summarize(read_nodes([str(tmp_path / "nodes"), str(tmp_path / "prices")])).usd_per_hour == 0.5
    prices = [{"at": at, "zone": "x", "price": price} for at, price in ((0, 0.5), (1950, 0.7), (19500, 0.9))]
    (tmp_path / "longer").write_text(recording(19500, {}, *prices))
    both = read_nodes([str(tmp_path / "nodes"), str(tmp_path / "longer")])
    assert (both.duration, [price.at for price in both.prices]) == (3600.0, [0.0, 1950.0]), "nodes were not watched on"
    (tmp_path / "at-once").write_text("0,add,n1\n")
    assert read_nodes([str(tmp_path / "at-once"), str(tmp_path / "longer")]).duration == 19500.0
    with pytest.raises(
        NodeTraceError, match=r"nodes and .*nodes together: node x-a-1 is added, but it is there already"
    ):
        read_nodes([str(tmp_path / "nodes"), str(tmp_path / "nodes")])


def test_a_compressed_file_is_read_as_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"0,add,a\r\n0,add,b\r\n3600,remove,a\r\n"
    (tmp_path / "plain.csv").write_bytes(text)
    (tmp_path / "small.csv.gz").write_bytes(gzip.compress(text))
    plain, small = (read_trace(str(tmp_path / name)) for name in ("plain.csv", "small.csv.gz"))
    assert plain.changes == small.changes
    assert len(small.changes) == 3
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(gzip.compress(text))
    with os.fdopen(reader):
        assert read_trace(f"/dev/fd/{reader}").changes == plain.changes, "a pipe is read but once"
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(NodeTraceError, match=r"^cannot read .*cut.gz: its compressed content is damaged: Compressed"):
        read_trace(str(tmp_path / "cut.gz"))
    monkeypatch.setattr(files, "MOST_BYTES", 2**20)
    (tmp_path / "large.gz").write_bytes(gzip.compress(b"0,add,n\n" * 2**18))
    with pytest.raises(NodeTraceError, match="it has more than 1 MiB"):
        read_trace(str(tmp_path / "large.gz"))


@pytest.mark.parametrize("text", ["0,add,a\n60000,add,b", "0,add,a\r\n\r\n60000,add,b\r\n", "0,add,a\r60000,add,b"])
def test_lines_may_end_as_on_any_system(text: str) -> None:
    assert [change.at for change in parse_trace("p", text).changes] == [0.0, 60.0]
    with pytest.raises(NodeTraceError, match=r"p line [34]: expected milliseconds,add|remove,node"):
        parse_trace("p", text.rstrip() + ("\r" if "\n" not in text else "\n") + "70,x")


def test_a_trace_of_too_many_changes_is_refused_before_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_CHANGES", 3)
    events = "".join(f"{i},add,n{i}\n" for i in range(5))
    entries = "".join(f'{{"at": {i}, "add": "n{i}"}}\n' for i in range(5))
    header = '{"format": "bamboo-trace", "version": 1}\n'
    for text in (events, header + entries):
        with pytest.raises(NodeTraceError, match="a trace has at most 3 changes, and this one has more"):
            parse_trace("p", text)


def test_nodes_that_are_there_for_no_time_are_refused_where_time_counts(tmp_path: Path) -> None:
    header, path = '{"format": "bamboo-trace", "version": 1}', tmp_path / "t.jsonl"
    path.write_text(f'{header}\n{{"at": 0, "add": "a"}}\n')
    with pytest.raises(NodeTraceError, match=r"t\.jsonl: no time passes in it, .* or a duration in its first line"):
        read_nodes([str(path)])
    path.write_text(f'{header[:-1]}, "duration": 60}}\n{{"at": 0, "add": "a"}}\n')
    assert read_nodes([str(path)]).duration == 60


@pytest.mark.parametrize(
    ("text", "expected", "duration"),
    [
        ("0,add,a\n60000,add,b\n60000,remove,a\n", ((0.0, 1), (60.0, 1)), 60.0),
        ("60000,remove,old\n120000,add,new\n", ((0.0, 1), (60.0, 0), (120.0, 1)), 120.0),
    ],
)
def test_a_table_says_what_happened_to_each_node(
    text: str, expected: tuple[tuple[float, int], ...], duration: float
) -> None:
    trace = parse_trace("t.csv", text)
    assert (nodes_over_time(trace), trace.duration) == (expected, duration)


def test_prices_without_a_node_are_told_from_nodes_without_a_price() -> None:
    """The operator records prices only of pools that have a price."""
    nodes = parse_trace("t.csv", recording(1, {"x-a": 2, "x-b": 1})).changes

    def priced(*zones: str) -> Trace:
        return make_trace(nodes, [PriceChange(at=0.0, zone=zone, usd_per_hour=1.0) for zone in zones], source="t")

    assert unpriced(priced()) == unpriced(priced("x")) == unpriced(priced("x-a"), all_nodes=True) == ""
    assert unpriced(priced("x-a")).startswith("t: it has prices for x-a, and none for nodes in zone x-b;")
    assert unpriced(priced("y"), all_nodes=True).startswith("t: it has prices for y, and none for nodes in zone x-a;")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t line 1: expected milliseconds,add|remove,node"),
        (
            "\n\nhello\n",
            "t line 3: expected milliseconds,add|remove,node, or JSON lines of bamboo-trace; found 'hello'",
        ),
        (f'"{"0" * 200_000}",add,a\n', "t line 1: "),
        ("0,add,a\n5,add,a\n", "t: node a is added, but it is there already, at 0.005 s"),
        ("0,add,a\n5,remove,a\n6,remove,a\n", "t: node a is removed, but it is not there, at 0.006 s"),
        ("0,add,a\n1e300,remove,a\n", "t line 2: the time must be a number from 0 to 1000000000 seconds"),
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
