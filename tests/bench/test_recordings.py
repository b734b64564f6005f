"""Recordings of nodes, or of node counts, in all formats that bench/headline.py reads."""

from pathlib import Path

import pytest

from _recordings import recordings
from bamboo.traces.summary import nodes_over_time
from bamboo.traces.trace import Change


@pytest.mark.parametrize(
    ("text", "expected", "duration"),
    [
        ("0,add,a\n60000,add,b\n60000,remove,a\n", ((0.0, 1), (60.0, 1)), 60.0),
        ("2021-12-11, 11:11:30, 2\n2021-12-11, 11:12:30, 3\n", ((0.0, 2), (60.0, 3)), 60.0),
        ("2021-12-11,11:11:30,2\n2021-12-11,11:10:30,1\n2021-12-11,11:12:30,1\n", ((0.0, 1),), 60.0),
        ("seconds,nodes\n0,4\n300,4\n600,1\n900,1\n", ((0.0, 4), (600.0, 1)), 900.0),
        ("seconds,x-a,x-b\n0,2,0\n600,1,3\n", ((0.0, 2), (600.0, 4)), 600.0),
    ],
)
def test_every_form_is_read(
    tmp_path: Path, text: str, expected: tuple[tuple[float, int], ...], duration: float
) -> None:
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "prices.csv").write_text("zone,tick,usd_per_hour\nx-a,0,0.5\n")
    ((name, trace),) = recordings(tmp_path)
    assert (name, nodes_over_time(trace), trace.duration) == ("t", expected, duration)
    assert {change.zone for change in trace.changes} == ({"x-a", "x-b"} if "x-a" in text else {""})


def test_where_only_numbers_are_known_the_oldest_node_goes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("seconds,nodes\n0,1\n300,2\n600,1\n")
    ((_, trace),) = recordings(tmp_path)
    assert [change.node for change in trace.changes if change.change is Change.REMOVE] == ["node1"]
