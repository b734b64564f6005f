"""Files of traces that cannot be read, and several files."""

from pathlib import Path

import pytest

from bamboo.traces.files import read_trace, read_traces
from bamboo.traces.summary import summarize
from bamboo.traces.trace import (
    NodeTraceError,
)


def test_files_that_cannot_be_read_and_several_files(tmp_path: Path) -> None:
    with pytest.raises(NodeTraceError, match="cannot read /no/such: No such file"):
        read_trace("/no/such")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(NodeTraceError, match="it is not UTF-8 text"):
        read_trace(str(tmp_path / "b"))
    (tmp_path / "nodes").write_text("seconds,x-a\n0,2\n3600,2\n")
    (tmp_path / "prices").write_text("zone,tick,usd_per_hour\nx,0,0.5\n")
    assert summarize(read_traces([str(tmp_path / "nodes"), str(tmp_path / "prices")])).usd_per_hour == 0.5
    with pytest.raises(
        NodeTraceError, match=r"nodes and .*nodes together: node x-a-1 is added, but it is there already"
    ):
        read_traces([str(tmp_path / "nodes"), str(tmp_path / "nodes")])
