"""Every mark in docs/troubleshooting.md's table of notices is put where the table says, and gives what it says.

The marks are read from the page, so that it cannot say what is not so; that it leaves none out is the generator's part.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bamboo_operator.signals.signals import Signal, SignalKind, node_signal
from operator_kit import NOW, at, node

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_notices.py"))
PLACES = {
    "taint",
    "condition",
    "label",
    "annotation",
    "field",
    "false condition Ready with",
}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Source, place, mark and notice of each mark of the page's table."""
    table = PAGE.partition(GENERATOR["BEGIN"])[2].partition(GENERATOR["END"])[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            for part in cells[2].split("; "):
                place = part.partition(" `")[0]
                for mark in re.findall("`([^`]+)`", part):
                    yield cells[0].strip("`"), place, mark, cells[3]


MARKS = list(rows())


def test_the_table_is_not_stale() -> None:
    assert GENERATOR["page"](PAGE) == PAGE, "run `make docs`"
    assert len(MARKS) > 40
    assert {place for _, place, _, _ in MARKS} == PLACES


@pytest.mark.parametrize(("source", "place", "mark", "notice"), MARKS, ids=[f"{row[1]} {row[2]}" for row in MARKS])
def test_a_mark_gives_the_notice_that_the_page_says(source: str, place: str, mark: str, notice: str) -> None:
    found = seen(place, mark)
    assert found is not None
    assert found.source == source
    if notice == "none: lost":
        assert found.kind is SignalKind.LOST
    else:
        assert notice.startswith(f"{found.seconds:.0f} s")


def seen(place: str, mark: str) -> Signal | None:
    """What the operator makes of an object that bears the mark and nothing else."""
    key, _, value = mark.partition("=")
    match place:
        case "taint":
            return node_signal(node(taints={key: value}), NOW)
        case "label":
            return node_signal(node(labels={key: value}), NOW)
        case "annotation":  # a time long after which the node goes by force, on a spot node
            spot = {"karpenter.sh/capacity-type": "spot"}
            return node_signal(node(annotations={key: at(3600)}, labels=spot), NOW)
        case "field":
            assert mark == "metadata.deletionTimestamp"
            return node_signal(node(deleted=at(0)), NOW)
        case "condition":
            condition = {"type": key, "reason": value or "Anything", "status": "True", "message": ""}
            return node_signal(node(conditions=(condition,)), NOW)
        case _:
            ready = {"type": "Ready", "reason": "KubeletNotReady", "status": "False", "message": mark}
            return node_signal(node(conditions=(ready,)), NOW)
