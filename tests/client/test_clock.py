"""What a run of `bamboo bench` does in its hour, by what its measurements are expected to take."""

import pytest

from bamboo.bench.bench_measurements import COMPILED, EAGER, PlannedMeasurement, list_measurements
from bamboo.bench.clock import ALL_SECONDS, HANGS, LEAST_SECONDS, PART_SECONDS, seconds_for
from bamboo.bench.report import BenchPart
from bamboo.bench.sizes import BenchSizes, choose_sizes
from bench_kit import machine

GB = 10**9
MACHINES = [(1, 24), (1, 80), (8, 80), (1, 141), (8, 141), (8, 192)]

TURNS = {  # what the sides of a group are compared with
    BenchPart.THROUGHPUT: {EAGER},
    BenchPart.PRICES: {"redundancy: None", "deterministic: false"},
}


def run(gpus: int, memory: int, slower: float = 1.0) -> tuple[list[PlannedMeasurement], dict[BenchPart, float]]:
    """What is measured, and what each part takes, if all takes so many times as long as is expected."""
    of = machine(gpus=gpus, memory=memory * GB)
    sizes = choose_sizes(of, quick=False)
    assert isinstance(sizes, BenchSizes)
    begun, used = list[PlannedMeasurement](), dict.fromkeys(BenchPart, 0.0)
    used[BenchPart.MACHINE] = PART_SECONDS[BenchPart.MACHINE]
    for one in list_measurements(of, sizes, tuple(BenchPart), rounds=2, quick=False):
        left = PART_SECONDS[one.part] - used[one.part], ALL_SECONDS - sum(used.values())
        seconds = seconds_for(one.part, one.expected, *left)
        if seconds is not None and not one.lacks:
            used[one.part] += min(slower * one.expected, seconds)
            begun.append(one)
    return begun, used


@pytest.mark.parametrize(("gpus", "memory"), MACHINES)
@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_no_part_takes_more_than_ten_minutes_and_all_no_more_than_an_hour(
    gpus: int, memory: int, slower: float
) -> None:
    begun, used = run(gpus, memory, slower)
    assert max(used.values()) <= 600.0
    assert sum(used.values()) <= ALL_SECONDS
    wanted = set(BenchPart) - {BenchPart.MACHINE} - (set() if gpus == 8 or memory == 24 else {BenchPart.LARGER})
    assert {one.part for one in begun} == wanted, "no part takes another one's time"


@pytest.mark.parametrize(("gpus", "memory"), MACHINES)
def test_the_first_hour_has_what_tells_most(gpus: int, memory: int) -> None:
    begun, _ = run(gpus, memory)
    widest = f"{max(2, gpus)} workers"
    sides = [one.side for one in begun if one.part is BenchPart.THROUGHPUT and one.round == 0]
    assert sides[:4] == [EAGER, COMPILED, "1 worker", widest]
    assert {f"{widest}, zero bubble", f"{widest}, compiled"} <= set(sides)
    if gpus == 8:
        assert {"1 worker with 8 devices", "2 workers", "4 workers", "8 pipelines of one stage"} <= set(sides)
        larger = {one.side for one in begun if one.part is BenchPart.LARGER}
        assert {EAGER, widest, f"{widest}, zero bubble, compiled"} <= larger
    prices = {(one.group, one.side) for one in begun if one.part is BenchPart.PRICES and one.round == 0}
    assert {("determinism", "deterministic: true"), ("redundancy", "LazyForward")} <= prices
    for group in {(one.part, one.group, one.round) for one in begun if one.part in TURNS}:
        sides = [one.side for one in begun if (one.part, one.group, one.round) == group]
        assert len(sides) == 1 or TURNS[group[0]] & set(sides), "what others are compared with"
    assert sum(one.part is BenchPart.CHECKS for one in begun) >= 9


def test_what_may_not_be_done_in_time_is_not_begun_but_at_the_beginning_of_its_part() -> None:
    part, whole = BenchPart.THROUGHPUT, PART_SECONDS[BenchPart.THROUGHPUT]
    assert seconds_for(part, 100.0, 99.0, ALL_SECONDS) is None
    assert seconds_for(part, 100.0, ALL_SECONDS, 99.0) is None
    assert seconds_for(part, 1.0, LEAST_SECONDS - 1, ALL_SECONDS) is None
    assert seconds_for(part, 10 * whole, whole, ALL_SECONDS) == whole


def test_what_hangs_leaves_time_for_the_others_of_its_part() -> None:
    part, whole = BenchPart.THROUGHPUT, PART_SECONDS[BenchPart.THROUGHPUT]
    assert seconds_for(part, 10.0, whole, ALL_SECONDS) == whole / 2
    assert seconds_for(part, 100.0, whole, ALL_SECONDS) == HANGS * 100.0
