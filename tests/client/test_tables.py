"""The figures of a report of `bamboo bench`, by values."""

import msgspec
import pytest

from bamboo.bench.bench_measurements import EAGER
from bamboo.bench.report import BenchPart
from bamboo.bench.tables import COPIES, BenchTable, loss_difference, peak_of, rate, sides, spread, tables, used
from bamboo.profiles.files import read_devices
from bench_kit import FLOPS, WHOLE, machine, measured, report


def by_title() -> dict[str, BenchTable]:
    return {table.title: table for table in tables(report(*WHOLE), read_devices())}


def test_sides_are_compared_round_by_round_with_the_first() -> None:
    plain, workers, compiled = sides([one for one in WHOLE if one.part is BenchPart.THROUGHPUT])
    assert rate(plain.rounds[0]) == pytest.approx(8 / 0.4)
    assert plain.ratios == (1.0, 1.0)
    assert workers.ratios == pytest.approx((1.6, 2.0))
    assert workers.samples_per_second == pytest.approx(36.0)
    assert (compiled.rounds, compiled.problem) == ((), "torch.compile needs a compiler")
    assert spread(workers.ratios) == "1.800 (1.600 to 2.000)"


def test_where_the_first_side_has_no_room_others_are_compared_with_the_next_one() -> None:
    lacking = measured(BenchPart.LARGER, EAGER, problem="no room", flops=FLOPS)
    found = [
        lacking,
        *(measured(BenchPart.LARGER, name, (step,)) for name, step in (("8 workers", 0.4), ("late", 0.2))),
    ]
    given = report(*found, parts=(BenchPart.LARGER,))
    (table,) = tables(msgspec.structs.replace(given, larger=given.model), read_devices())
    assert [row[:3] for row in table.rows] == [
        (EAGER, "–", "no room"),
        ("8 workers", "20", "1.000 (1.000 to 1.000)"),
        ("late", "40", "2.000 (2.000 to 2.000)"),
    ]
    assert "Ratio: over 8 workers" in table.note
    assert table.rows[1][-2] != "–", "operations are known all the same"
    (none,) = tables(report(lacking, parts=(BenchPart.LARGER,)), read_devices())
    assert none.rows == ((EAGER, "no room"),)


def test_mfu_is_of_all_devices_that_compute_and_of_the_makers_figure() -> None:
    found = report(*WHOLE)
    peak = peak_of(found, read_devices(), "bf16")
    assert peak == 989.4e12
    alone, two = (sides([measured(BenchPart.THROUGHPUT, "a", (0.4,), devices=number)])[0] for number in (1, 2))
    assert used(alone, 1.5e13, peak) == pytest.approx(20 * 1.5e13 / 989.4e12)
    assert used(two, 1.5e13, peak) == pytest.approx(10 * 1.5e13 / 989.4e12)
    assert used(two, 1.5e13, None) is None
    assert peak_of(report(machine=machine()), read_devices(), "fp32") is None
    assert by_title()["Throughput"].rows[0][-2:] == ("30.3 %", "42.9 %")


def test_checks_say_where_bits_differ_and_how_far_losses_are() -> None:
    assert by_title()["Self-checks"].rows == (
        ("fp32, two losses", "equal", "1.0e-04"),
        ("bf16", "DIFFERENT", "–"),
    )
    one, other = (measured(BenchPart.CHECKS, "", losses=losses) for losses in ((1.0, 2.1), (1.0, 2.0)))
    assert loss_difference(one, other) == pytest.approx(0.05)
    assert loss_difference(measured(BenchPart.CHECKS, ""), other) is None


def test_prices_are_how_much_longer_a_step_takes() -> None:
    table = by_title()["The price of determinism"]
    assert table.rows[1] == ("deterministic: true", "1100", "+10.0 (+10.0 to +10.0)")


def test_time_that_is_no_wait_and_no_copy_is_computing() -> None:
    assert by_title()["What the workers' threads did"].rows == (("None", "60.0 %", "30.0 %", "10.0 %", "3.0 %"),)


def test_what_devices_did_is_shown_for_each_or_that_nobody_saw_it() -> None:
    computing = ("None, cuda:0", "250", "50.0 %", "20.0 %", "10.0 %", "0.0 %", "5.0 %", "45.0 %")
    assert by_title()["What the devices did"].rows == (computing,)
    blind = measured(BenchPart.TRACE, "None", shares=dict.fromkeys(("idle", *COPIES), 0.0))
    table = next(iter(tables(report(blind, parts=(BenchPart.TRACE,)), read_devices())))
    assert table.rows == (("None", "torch.profiler saw nothing of them", *6 * ("–",)),)


def test_a_loss_is_shown_with_its_pause_and_the_step_in_which_it_came() -> None:
    table = by_title()["Losses of workers"]
    assert table.rows[0] == ("1", "25 % of step 6", "1000", "200", "1.50")
    assert table.rows[-1] == ("median", "–", "–", "200", "1.50")
    assert "bits are equal to those" in table.note


def test_memory_is_shown_beside_its_estimate() -> None:
    assert by_title()["Memory"].rows == (("None", "1.0 GiB", "1.0 GiB", "3.0 GiB", "1"),)
