"""bench/oobleck.py: the replay of Oobleck's measured speeds, and a small case with the real coordinator."""

from pathlib import Path

import pytest

from bamboo.traces.files import read_trace
from oobleck import Measured, Shape, read_measured, replayed, run_cell

TABLE = "0,add,a\n0,add,b\n100000,remove,a\n150000,add,c\n200000,remove,b\n"


def test_oobleck_loses_the_step_of_a_loss_and_pauses_at_each_change(tmp_path: Path) -> None:
    """Two nodes do twelve whole steps of 8 s; after a pause of 10 s one node trains for 40 s. If a new node joins at
    once, two nodes pause for 10 s, too, and do five steps of 8 s; otherwise one node trains on for 50 s.
    """
    (tmp_path / "nodes.csv").write_text(TABLE)
    trace = read_trace(str(tmp_path / "nodes.csv"))
    known = Measured({1: 1.0, 2: 2.0}, 10.0)
    assert replayed(known, 16, trace, joins_at_once=True) == pytest.approx((12 * 16 + 40 + 5 * 16) / 200)
    assert replayed(known, 16, trace, joins_at_once=False) == pytest.approx((12 * 16 + 90) / 200)


def test_a_table_without_the_model_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "throughput.csv"
    table.write_text("model,system,nodes,samples_per_s,reconfigure_ms,restart_ms\nx,oobleck,2,1.5,2000,0\n")
    assert read_measured(table, "x") == Measured({2: 1.5}, 2.0)
    with pytest.raises(ValueError, match="expected lines of model y and system oobleck"):
        read_measured(table, "y")


def test_a_cell_is_trained_by_the_coordinator(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(
        "".join(f"0,add,n{n}\n" for n in range(30)) + "200000,remove,n3\n400000,remove,n4\n"
    )
    trace = read_trace(str(tmp_path / "nodes.csv"))
    shape = Shape(batch=512, samples=8, blocks=6, width=1024, context=512, vocabulary=1000)
    known = Measured({nodes: 10.0 * nodes for nodes in range(15, 31)}, 2.0)
    found = run_cell("small", shape, "two losses", known, trace, 16e9)
    assert (found["outcome"], found["restores"]) == ("cut", 0)
    assert 0.5 * 300 < found["ours"] <= 1.1 * 300
