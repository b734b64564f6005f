"""Files of traces that cannot be read, and several files."""

import gzip
import os
from pathlib import Path

import pytest

from bamboo.traces import files, tables
from bamboo.traces.files import parse_trace, read_nodes, read_trace, read_traces
from bamboo.traces.summary import summarize
from bamboo_core.traces import json_lines
from bamboo_core.traces.trace import NodeTraceError


def test_files_that_cannot_be_read_and_several_files(tmp_path: Path) -> None:
    with pytest.raises(NodeTraceError, match="cannot read /no/such: No such file"):
        read_trace("/no/such")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(NodeTraceError, match="it is not UTF-8 text"):
        read_trace(str(tmp_path / "b"))
    (tmp_path / "nodes").write_text("seconds,x-a\n0,2\n3600,2\n")
    (tmp_path / "prices").write_text("zone,tick,usd_per_hour\nx,0,0.5\n")
    assert summarize(read_traces([str(tmp_path / "nodes"), str(tmp_path / "prices")])).usd_per_hour == 0.5
    (tmp_path / "longer").write_text("zone,tick,usd_per_hour\nx,0,0.5\nx,10,0.7\nx,100,0.9\n")
    both = read_traces([str(tmp_path / "nodes"), str(tmp_path / "longer")])
    assert (both.duration, [price.at for price in both.prices]) == (3600.0, [0.0, 1950.0]), "nodes were not watched on"
    (tmp_path / "at-once").write_text("0,add,n1\n")
    assert read_traces([str(tmp_path / "at-once"), str(tmp_path / "longer")]).duration == 19500.0
    with pytest.raises(
        NodeTraceError, match=r"nodes and .*nodes together: node x-a-1 is added, but it is there already"
    ):
        read_traces([str(tmp_path / "nodes"), str(tmp_path / "nodes")])


def test_a_compressed_file_is_read_as_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"seconds,x-a\r\n0,2\r\n3600,1\r\n"
    (tmp_path / "plain.csv").write_bytes(text)
    (tmp_path / "small.csv.gz").write_bytes(gzip.compress(text))
    plain, small = (read_trace(str(tmp_path / name)) for name in ("plain.csv", "small.csv.gz"))
    assert plain.changes == small.changes
    assert len(small.changes) == 3
    monkeypatch.setattr(files, "MOST_BYTES", 2**20)
    (tmp_path / "large.gz").write_bytes(gzip.compress(b"0,add,n\n" * 2**18))
    with pytest.raises(NodeTraceError, match="it has more than 1 MiB"):
        read_trace(str(tmp_path / "large.gz"))


TEXT = b"seconds,x-a\n0,2\n3600,1\n"
PACKED = gzip.compress(TEXT, mtime=0)
SPOILT = PACKED[:-6] + bytes([PACKED[-6] ^ 1]) + PACKED[-5:]


@pytest.mark.parametrize(
    "content",
    [
        PACKED + bytes(3),
        PACKED + bytes(200_000),
        gzip.compress(TEXT[:9]) + gzip.compress(b"") + bytes(70_000) + gzip.compress(TEXT[9:]) + bytes(1),
        b"".join(gzip.compress(TEXT[at : at + 1]) for at in range(len(TEXT))),
    ],
)
def test_several_streams_are_one_and_zeros_are_padding(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.gz").write_bytes(content)
    assert gzip.decompress(content) == TEXT
    assert read_trace(str(tmp_path / "t.gz")).changes == parse_trace("t", TEXT.decode()).changes


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (PACKED + b"more", "behind its compressed content are 4 bytes that are none"),
        (PACKED + bytes(100_000) + b"more" + PACKED, f"behind its compressed content are {4 + len(PACKED)} bytes that"),
        (PACKED[:-9], "its compressed content is cut off"),
        (PACKED + PACKED[:2], "its compressed content is cut off"),
        (SPOILT, "its compressed content is damaged: .*incorrect data check"),
        (PACKED + SPOILT, "its compressed content is damaged: .*incorrect data check"),
        (b"\x1f\x8b text", "its compressed content is damaged: "),
    ],
)
def test_what_is_wrong_with_a_compressed_file_is_said(tmp_path: Path, content: bytes, wrong: str) -> None:
    (tmp_path / "t.gz").write_bytes(content)
    with pytest.raises(NodeTraceError, match=rf"^cannot read .*t.gz: {wrong}"):
        read_trace(str(tmp_path / "t.gz"))


@pytest.mark.parametrize(
    "text", ["seconds,nodes\n0,1\n60,2", "seconds,nodes\r\n0,1\r\n\r\n60,2\r\n", "seconds,nodes\r0,1\r60,2"]
)
def test_lines_may_end_as_on_any_system(text: str) -> None:
    assert [change.at for change in parse_trace("p", text).changes] == [0.0, 60.0]
    with pytest.raises(NodeTraceError, match=r"p line [45]: the count must be from 0 to 100000, not 'x'"):
        parse_trace("p", text.rstrip() + ("\r" if "\n" not in text else "\n") + "70,x")


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_as_a_file(packed: bool) -> None:
    text = b"0,add,n1\n3600000,remove,n1\n"
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "wb") as file:
            file.write(gzip.compress(text) if packed else text)
        trace = read_trace(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
    assert [change.node for change in trace.changes] == ["n1", "n1"]


def test_a_trace_of_too_many_changes_is_refused_before_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tables, json_lines):
        monkeypatch.setattr(module, "MOST_CHANGES", 3)
    events = "".join(f"{i},add,n{i}\n" for i in range(5))
    entries = "".join(f'{{"at": {i}, "add": "n{i}"}}\n' for i in range(5))
    prices = "".join(f"a,{i},0.{i}\n" for i in range(5))
    header = '{"format": "bamboo-trace", "version": 1}\n'
    for text in (events, header + entries, "zone,tick,usd_per_hour\n" + prices, "seconds,nodes\n0,5\n"):
        with pytest.raises(NodeTraceError, match="a trace has at most 3 changes, and this one has more"):
            parse_trace("p", text)


def test_nodes_that_are_there_for_no_time_are_refused_where_time_counts(tmp_path: Path) -> None:
    """Whoever trains with them: in a job, a strategy, a plan or the published simulator."""
    header, path = '{"format": "bamboo-trace", "version": 1}', tmp_path / "t.jsonl"
    path.write_text(f'{header}\n{{"at": 0, "add": "a"}}\n')
    with pytest.raises(NodeTraceError, match=r"t\.jsonl: no time passes in it, .* or a duration in its first line"):
        read_nodes([str(path)])
    assert len(read_traces([str(path)]).changes) == 1
    path.write_text(f'{header[:-1]}, "duration": 60}}\n{{"at": 0, "add": "a"}}\n')
    assert read_nodes([str(path)]).duration == 60
