"""The recommended candidate of a front, its reasons and alternatives."""

import math
from dataclasses import replace

import msgspec

from bamboo.sizing.choice import Bounds, choose, comparisons, on_demand, reasons
from bamboo.sizing.estimate import Estimate, estimate, step_seconds
from bamboo.sizing.price_list import MachinePrice
from bamboo.sizing.trials.trial import Assessment
from bamboo.sizing.trials.world import World
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancyMode
from job_simulation_kit import manifest
from sizing_kit import assessed, layered, outcome, world

AT = world(manifest(2, 1, 6), layered(4))


def test_bounds_choose_of_the_front() -> None:
    fast, middle, cheap = assessed(1, (1.0, 9.0)), assessed(2, (2.0, 4.0)), assessed(3, (8.0, 3.0))
    known = [fast, middle, cheap]
    assert choose(known, Bounds()) is middle
    assert choose(known, Bounds(budget=10)) is fast
    assert choose(known, Bounds(budget=3.5)) is cheap
    assert choose(known, Bounds(deadline=5)) is middle
    assert choose(known, Bounds(deadline=0.5)) is None
    spread = assessed(4, (1.0, 8.0), (1.0, 12.0))
    assert choose([spread], Bounds(budget=11)) is None  # 10 on average, but not with a margin


def test_who_says_nothing_of_its_end_is_not_chosen() -> None:
    never = assessed(1, (float("inf"), float("inf")))
    assert choose([never], Bounds()) is None
    assert choose([never, assessed(2, (2.0, 4.0))], Bounds()) == assessed(2, (2.0, 4.0))


def test_three_sentences_say_what_by_which_rule_and_from_how_many_runs() -> None:
    middle = assessed(2, (2.0, 4.0))
    said = reasons(AT, middle, Bounds())
    assert len(said) == 3
    assert "the job takes 2.00 h and costs 4.00 USD" in said[0]
    assert "--deadline and --budget choose otherwise" in said[1]
    assert "That is from 1 run of 1.00 h on average, the rest of 2.00 h in proportion" in said[2]
    assert reasons(AT, middle, Bounds(budget=5))[1] == (
        "It is the fastest that costs at most 5.00 USD in the one run: at most 4.00 USD."
    )
    assert reasons(AT, middle, Bounds(budget=5, deadline=3))[1] == (
        "It is the cheapest that ends within 3.00 h and costs at most 5.00 USD in the one run: at most 2.00 h and"
        " 4.00 USD."
    )


def test_what_another_choice_costs_is_a_line_each() -> None:
    middle = assessed(2, (2.0, 4.0))
    alike = replace(middle.candidate, mode=RedundancyMode.NONE)
    without = Assessment(candidate=alike, outcomes=(outcome(float("inf"), float("inf")),))
    (found,) = comparisons(middle, [assessed(1, (1.0, 9.0)), middle, without])
    assert (found.label, found.hours, found.hours_deviation) == ("mode None", math.inf, None)


def test_a_single_worker_is_not_compared_by_what_it_has_none_of() -> None:
    alone = assessed(1, (2.0, 4.0))
    others = [
        replace(alone.candidate, mode=RedundancyMode.NONE),
        replace(alone.candidate, spread=SpreadPolicy.SINGLE_ZONE),
        replace(alone.candidate, standby=1),
    ]
    simulated = [Assessment(candidate=one, outcomes=(outcome(2.0, 5.0),)) for one in others]
    assert [one.label for one in comparisons(alone, simulated)] == ["1 on standby"]
    several = replace(alone.candidate, stages=2)
    both = [Assessment(candidate=replace(one, stages=2), outcomes=(outcome(2.0, 5.0),)) for one in others]
    found = comparisons(Assessment(candidate=several, outcomes=alone.outcomes), both)
    assert [one.label for one in found] == ["all in one zone", "mode None", "1 on standby"]


def estimated(at: World, stages: int) -> Estimate:
    one = replace(assessed(stages, (1.0, 1.0)).candidate, pipelines=1)
    return estimate(at, one, step_seconds(at, one), 0.0)


def test_on_demand_it_is_the_cheapest_grid_that_is_not_slower() -> None:
    at = world(manifest(2, 1, 6), layered(4))
    grids = [estimated(at, stages) for stages in (1, 2, 4)]
    hours = [at.machines["m"].profile.times.start / 3600 + at.steps * one.seconds / 3600 for one in grids]
    assert hours[0] > hours[1] > hours[2]
    labels = []
    for within in ((hours[1] + hours[0]) / 2, 2 * hours[0], hours[2] / 2):  # in the last one none is as fast
        found = on_demand(at, grids, assessed(9, (within, 1.0)))
        labels.append(found.label if found is not None else "")
    assert labels == [f"on demand, {nodes} of m" for nodes in ("2 nodes", "1 node", "4 nodes")]


def test_without_a_price_on_demand_nothing_is_said_of_it() -> None:
    priced = world(manifest(2, 1, 6), layered(4))
    known, one = estimated(priced, 2), assessed(2, (1.0, 1.0))
    assert on_demand(world(manifest(2, 1, 6), msgspec.structs.replace(layered(4), prices=None)), [known], one) is None
    not_to_be_had = replace(priced.machines["m"], price=MachinePrice(spot=1.0))
    assert on_demand(replace(priced, machines={"m": not_to_be_had}), [known], one) is None
