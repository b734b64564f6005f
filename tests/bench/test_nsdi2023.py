"""`nsdi2023.simulator`: agreement with the published program and with the published means; refusals."""

import csv
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bamboo.simulation.figures import SimulationError, spread
from bamboo.traces.files import read_nodes
from nsdi2023.nodes import HourlyNodes, Moment, recorded
from nsdi2023.simulator import Figures, simulate
from nsdi2023.workloads import Workload, workload_of

HERE = Path(__file__).parent
BERT = workload_of("bert")
TINY = replace(BERT, stages=2, step_ms={1: 4000, 2: 2000}, samples=8)
MINUTE = 60_000
COUNTS = ("preemptions", "fatal", "steps")


def run(moments: list[Moment], minutes: float, *, workload: Workload = TINY) -> Figures:
    return simulate(workload, moments, milliseconds=round(minutes * MINUTE))


def add(*nodes: str, at: int = 0) -> list[Moment]:
    """Return the additions of these nodes, 1 ms apart from `at` ms on, so that the nodes share a rendezvous."""
    return [(at + number, True, node) for number, node in enumerate(nodes)]


def recorded_runs() -> list[dict[str, str]]:
    """Return the figures of the published program at its commit 80809293289419d40a870b4a9ccb8df0082ce3fb, as written by

    python bench/published.py CHECKOUT --seeds 2 --rates 0.1,0.5 --whole-runs 1 \\
        --trace tests/bench/minute_recording.csv --csv tests/bench/published_figures.csv

    The recording is invented and has only whole minutes, so that many nodes come and go at the same moment.
    """
    with (HERE / "published_figures.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", recorded_runs(), ids=lambda row: "-".join(row[name] for name in ("model", "stages", "hours", "rate", "seed"))
)
def test_a_run_agrees_with_the_published_program_to_the_last_digit(row: dict[str, str]) -> None:
    workload = workload_of(row["model"], int(row["stages"]))
    milliseconds = round(float(row["hours"]) * 3_600_000) if row["hours"] else None
    steps = None if row["hours"] else workload.steps

    def figures() -> dict[str, float]:
        made_up = HourlyNodes(int(row["seed"]), float(row["rate"]), workload.capacity, int(row["start_hour"]))
        nodes = recorded(read_nodes([str(HERE / row["recording"])])) if row["recording"] else made_up
        return asdict(simulate(workload, nodes, steps=steps, milliseconds=milliseconds))

    if row["refused"]:
        with pytest.raises(SimulationError, match=r"step times of .* are known for at most 4"):
            figures()
        return
    found = figures()
    expected = {name: (int if name in COUNTS else float)(row[name]) for name in found if name != "hours"}
    assert found == expected | {"hours": float(row["hours_run"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "figures"),
    [
        (0.01, (4.91, 1.777, 9.34, 0.026, 43.76, 149.59, 39.82, 3.70, 11.2)),
        (0.05, (26.44, 0.448, 7.22, 0.110, 42.40, 136.53, 38.58, 3.50, 12.2)),
        (0.10, (53.76, 0.229, 5.31, 0.147, 40.64, 132.00, 36.98, 3.53, 12.6)),
        (0.25, (143.43, 0.100, 2.82, 0.510, 35.34, 115.62, 32.16, 3.55, 14.5)),
        (0.50, (346.11, 0.058, 1.43, 2.778, 26.95, 83.27, 24.52, 3.31, 20.1)),
    ],
)
def test_the_published_means_of_1000_seeds(rate: float, figures: tuple[float, ...]) -> None:
    """At rate 0.50 the published table has 24.53 USD an hour; the published program and `simulate` compute 24.5247."""
    runs = [simulate(BERT, HourlyNodes(seed, rate, BERT.capacity), steps=BERT.steps) for seed in range(1, 1001)]
    mean = spread(runs).mean
    order = ("preemptions", "interval", "lifetime", "fatal", "nodes", "throughput", "usd_per_hour", "value", "hours")
    digits = (2, 3, 2, 3, 2, 2, 2, 2, 1)
    assert tuple(round(mean[name], places) for name, places in zip(order, digits, strict=True)) == figures


def test_what_cannot_be_simulated_is_named() -> None:
    with pytest.raises(SimulationError, match=r"3 pipelines of 2 stages .* are known for at most 2"):
        run(add(*"abcdef"), 5)
    with pytest.raises(SimulationError, match="never enough nodes for one pipeline"):
        run(add("a"), 5)
    with pytest.raises(SimulationError, match=r"a is taken away after 0\.03 hours, when it is not there"):
        run([*add("a", "b"), (90_000, False, "a"), (90_000, True, "a"), (100_000, False, "a")], 5)
    with pytest.raises(SimulationError, match=r"a step ends after 0\.03 hours without a node that is paid for"):
        run([*add("a", "b"), (110_000, False, "b"), (110_001, False, "a")], 5)
    with pytest.raises(SimulationError, match="expected one of gpt-2, bert"):
        workload_of("gpt-5")
    with pytest.raises(SimulationError, match="known for 8, 12 and 15 stages"):
        workload_of("bert", 9)
    with pytest.raises(SimulationError, match="the run is not done after 2000 hours"):
        simulate(BERT, HourlyNodes(3, 0.0, BERT.capacity), steps=10**9)
