"""`bamboo simulate --model research`: what is known of the published simulator, its rules by hand, and the command."""

import csv
import io
import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.simulation.figures import Figures, SimulationError, spread
from bamboo.simulation.pool import ResearchRun, simulate_all, simulate_run
from bamboo.simulation.research.cost_model import KnownBug, ResearchOptions, simulate
from bamboo.simulation.research.research_events import Moment, ResearchHours
from bamboo.simulation.research.research_workloads import WORKLOADS, Workload, workload_of

BERT = workload_of("bert")
MINUTE = 60_000
TINY = replace(BERT, stages=2, step_ms={1: 4000, 2: 2000}, samples=8)


def published(rate: float, seed: int = 1) -> Figures:
    options = ResearchOptions(steps=BERT.steps)
    return simulate_run(ResearchRun(workload=BERT, seed=seed, rate=rate, start_hour=0, options=options))


def run(moments: list[Moment], minutes: float, *fixed: KnownBug, workload: Workload = TINY) -> Figures:
    options = ResearchOptions(milliseconds=round(minutes * MINUTE), fixed=frozenset(fixed))
    return simulate(workload, moments, options)


def add(*nodes: str, at: int = 0) -> list[Moment]:
    """A millisecond apart, so that their order is plain; all of them meet in one rendezvous."""
    return [(at + number, True, node) for number, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("rate", "figures"),
    [
        (0.01, (1, 0, 0, 9.6212, 41.7918, 162.6584, 38.0305, 3.9392, 11.0504)),
        (0.10, (46, 0, 0.2596, 5.5476, 39.0923, 136.7320, 35.5740, 3.6346, 12.9138)),
        (0.50, (347, 1, 0.0606, 1.4928, 25.6250, 81.0828, 23.3188, 3.2993, 21.3214)),
    ],
)
def test_the_published_runs_of_seed_1(rate: float, figures: tuple[float, ...]) -> None:
    assert tuple(round(value, 4) for value in list(asdict(published(rate)).values())[:-1]) == figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "figures"),
    [
        (0.01, (4.91, 1.777, 9.34, 0.026, 43.76, 149.59, 39.82, 3.70, 11.2)),
        (0.05, (26.44, 0.448, 7.22, 0.110, 42.40, 136.53, 38.58, 3.50, 12.2)),
    ],
)
def test_the_published_means_of_1000_seeds(rate: float, figures: tuple[float, ...]) -> None:
    """docs/simulator.md says by how much the rows of higher rates differ in their last digits."""
    options = ResearchOptions(steps=BERT.steps)
    runs = [ResearchRun(workload=BERT, seed=seed, rate=rate, start_hour=0, options=options) for seed in range(1, 1001)]
    mean = spread([simulate_run(one) for one in runs]).mean
    order = ("preemptions", "interval", "lifetime", "fatal", "nodes", "throughput", "usd_per_hour", "value", "hours")
    digits = (2, 3, 2, 3, 2, 2, 2, 2, 1)
    assert tuple(round(mean[name], places) for name, places in zip(order, digits, strict=True)) == figures


def test_the_draws_of_an_hour() -> None:
    """They follow the seed, stay within the hour and the capacity, and take only who is there, after it came."""
    for seed in range(20):
        hours = ResearchHours(seed, 0.5, 48)
        there = hours.first()
        for begin in range(0, 5 * 3_600_000, 3_600_000):
            moments = hours.hour(begin, there)
            assert moments == sorted(moments, key=lambda moment: (moment[0], not moment[1]))
            for at, added, node in moments:
                assert begin <= at < begin + 3_600_000
                assert (node in there) is not added
                there = [*there, node] if added else [one for one in there if one != node]
                assert len(there) <= 48
    assert ResearchHours(1, 0.5, 48).first() == ResearchHours(1, 0.5, 48).first()


def test_steps_begin_after_creation_and_rendezvous() -> None:
    """45 s until the nodes are ready, 30 s until they have met; then 4 s for each step."""
    found = run(add("a", "b"), 2)
    assert (found.steps, round(found.hours * 3600, 6)) == (11, 75 + 11 * 4)
    assert (found.nodes, found.usd_per_hour) == pytest.approx((2, 1.82), rel=1e-4)
    assert (found.throughput, found.value) == pytest.approx((2, 2 / 1.82))


def test_more_nodes_make_another_pipeline_after_a_local_rendezvous() -> None:
    """Ready at 105 s; the step ends at 107 s; 20 s later there are two pipelines."""
    found = run([*add("a", "b"), *add("c", "d", at=MINUTE)], 3)
    assert found.steps == (107 - 75) // 4 + (180 - 127) // 2


def test_a_neighbour_takes_over_and_the_pipelines_form_anew() -> None:
    """At 100 s, 3 s before its end, a step grows by half of what is left, to 104.5 s; c takes the place at 124.5 s."""
    found = run([*add("a", "b", "c"), (100_000, False, "b")], 3)
    assert (found.preemptions, found.fatal) == (1, 0)
    assert found.steps == 7 + int((180 - 124.5) / 4)


@pytest.mark.parametrize("fixed", [(), (KnownBug.DOUBLE_RENDEZVOUS,)])
def test_a_fatal_preemption_and_the_rendezvous_that_finds_nobody(fixed: tuple[KnownBug, ...]) -> None:
    """The step of 103 s ends at 104.5 s. With the bug it begins a local rendezvous, which ends before the global one;
    that one finds an empty list at 130 s, and nobody trains until another node is ready, here never."""
    moments = [*add("a", "b", "c", "d", "e"), (100_000, False, "a"), (100_001, False, "b")]
    workload = replace(TINY, stages=3, step_ms={1: 4000})
    found = run(moments, 5, *fixed, workload=workload)
    assert (found.preemptions, found.fatal) == (2, 1)
    if fixed:
        assert found.steps == (100 - 75) // 4 + int((300 - 130.001) / 4)
    else:
        assert (found.steps, round(found.hours * 3600, 6)) == (8, 128.5)


def test_no_second_rendezvous_if_who_took_over_is_lost() -> None:
    """b's stage went to a; without a nobody is overloaded, so slow steps go on until the global rendezvous ends."""
    moments = [*add("a", "b", "c", "d", "e"), (100_000, False, "b"), (100_001, False, "a")]
    found = run(moments, 5, workload=replace(TINY, stages=3, step_ms={1: 4000}))
    assert found.fatal == 1
    assert found.steps == (100 - 75) // 4 + 1 + int((130.001 - 104.5) / 6) + int((300 - 130.001) / 4)


def test_nodes_that_nobody_lists_keep_their_stages() -> None:
    """After the rendezvous that finds nobody, c takes b's stage over at 140 s; so losing c is fatal, and forms a grid
    of those who are left."""
    moments = [*add(*"abcdefgh"), (100_000, False, "a"), (100_001, False, "b")]
    moments += [(140_000, False, "d"), (150_000, False, "c")]
    workload = replace(TINY, stages=3, step_ms={1: 4000, 2: 2000})
    assert (run(moments[:-2], 5, workload=workload).fatal, run(moments, 5, workload=workload).fatal) == (1, 2)
    assert run(moments, 5, workload=workload).hours * 3600 > 290


def test_a_waiting_node_that_is_gone_still_counts_unless_the_bug_is_left_out() -> None:
    """c waits and goes; with d there seem to be enough for a second pipeline, so all meet for 20 s for nothing."""
    moments = [*add("a", "b", "c"), (100_000, False, "c"), *add("d", at=100_000)]
    fixed = KnownBug.STANDBY_SLOWDOWN
    with_bug, without = run(moments, 4, fixed), run(moments, 4, fixed, KnownBug.PHANTOM_STANDBY)
    assert without.steps == (240 - 75) // 4
    assert with_bug.steps == without.steps - 5


def test_a_waiting_node_that_is_gone_slows_steps_unless_the_bug_is_left_out() -> None:
    """At 100 s, 3 s before its end, a step grows by half of what is left; those after it take 6 s instead of 4."""
    moments = [*add("a", "b", "c"), (100_000, False, "c")]
    assert run(moments, 4).steps == 7 + int((240 - 104.5) / 6)
    assert run(moments, 4, KnownBug.STANDBY_SLOWDOWN).steps == (240 - 75) // 4


def test_value_as_a_mean_of_ratios_or_as_the_ratio_of_means() -> None:
    moments = [*add("a", "b"), *add("c", at=MINUTE)]
    with_bug, without = run(moments, 3), run(moments, 3, KnownBug.MEAN_OF_RATIOS)
    assert without.value == without.throughput / without.usd_per_hour != with_bug.value


def test_what_cannot_be_simulated_is_named() -> None:
    with pytest.raises(SimulationError, match=r"3 pipelines of 2 stages .* are known for at most 2"):
        run(add(*"abcdef"), 5)
    with pytest.raises(SimulationError, match="never enough nodes for one pipeline"):
        run(add("a"), 5)
    with pytest.raises(SimulationError, match="--workload must be one of gpt-2, bert"):
        workload_of("gpt-5")
    with pytest.raises(SimulationError, match="known for 8, 12 and 15 stages"):
        workload_of("bert", 9)
    never = ResearchRun(workload=BERT, seed=3, rate=0.0, start_hour=0, options=ResearchOptions(steps=10**9))
    with pytest.raises(SimulationError, match="rate 0, seed 3: the run is not done after 2000 hours"):
        simulate_run(never)


def test_every_workload_trains() -> None:
    for name in WORKLOADS:
        options = ResearchOptions(milliseconds=6 * 3_600_000)
        found = simulate_run(ResearchRun(workload=workload_of(name), seed=2, rate=0.25, start_hour=0, options=options))
        assert 0 < found.hours <= 6


def test_processes_change_no_result() -> None:
    options = ResearchOptions(steps=500)
    runs = [ResearchRun(workload=BERT, seed=seed, rate=0.5, start_hour=7, options=options) for seed in range(20)]
    told: list[int] = []
    assert list(simulate_all(runs, 2, told.append)) == list(simulate_all(runs, 1, told.append))
    assert sum(told) == 40


def test_the_spread_of_runs_is_their_mean_and_deviation() -> None:
    one = published(0.01)
    found = spread([one, replace(one, preemptions=3, fatal=2)])
    assert (found.mean["preemptions"], found.deviation["preemptions"]) == (2, 1)
    assert (found.fatal_share, found.runs, found.deviation["value"]) == (0.5, 2, 0)


def test_the_command_prints_each_case_in_every_form() -> None:
    def called(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["simulate", "--model", "research", "--jobs", "1", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    rates = ("--preempt-rate", "0.01", "--preempt-rate", "0.5", "--seeds", "1:2", "--steps", "3000")
    documents = json.loads(called(*rates, "--output", "json"))
    found = [(one["case"], one["runs"], one["mean"]["steps"]) for one in documents]
    assert found == [("0.01", 2, 3000), ("0.5", 2, 3000)]
    rows = list(csv.DictReader(io.StringIO(called(*rates, "--output", "csv"))))
    assert [float(row["nodes"]) for row in rows] == [one["mean"]["nodes"] for one in documents]
    assert "SAMPLES/S" in called(*rates)
    bugs = ("--without-bug", "double-rendezvous", "--without-bug", "mean-of-ratios")
    assert json.loads(called(*rates, *bugs, "-o", "json"))[0]["mean"]["value"] != documents[0]["mean"]["value"]


def test_the_command_under_a_trace(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("traces") / "t.csv"
    file.write_text("".join(f"0,add,n{number}\n" for number in range(13)) + "1800000,remove,n3\n3600000,remove,n5\n")
    done = CliRunner().invoke(app, ["simulate", "--model", "research", "--trace", str(file), "-o", "json"])
    (found,) = json.loads(done.stdout)
    assert (found["case"], found["runs"], found["mean"]["preemptions"]) == ("t.csv", 1, 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--preempt-rate or --trace: expected one of them"),
        (["--preempt-rate", "2"], "--preempt-rate 2: expected a probability from 0 to 1"),
        (["--preempt-rate", "nan"], "--preempt-rate nan: expected a probability"),
        (["--preempt-rate", "0.1", "--trace", "t.csv"], "--preempt-rate: cannot be combined with --trace"),
        (["--trace", "/no/such"], "cannot read /no/such: No such file or directory"),
        (["--preempt-rate", "0.1", "--seeds", "x"], "--seeds must be a number of seeds or A:B, not 'x'"),
        (["--preempt-rate", "0.1", "--seeds", "5:4"], "--seeds must name from 1 to 1000000 seeds, not '5:4'"),
        (["--preempt-rate", "0.1", "--workload", "vgg"], "--steps or --hours: expected one of them"),
        (["--preempt-rate", "0.1", "--workload", "x"], "--workload must be one of gpt-2, bert, resnet"),
        (["--preempt-rate", "0.1", "--hours", "0"], "--hours must be more than 0 and at most 87600, not 0"),
        (["--preempt-rate", "0.1", "--without-bug", "x"], "--without-bug must be one of double-rendezvous"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, ["simulate", "--model", "research", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"bamboo: {problem}")
    assert done.stderr.count("\n") == 1
