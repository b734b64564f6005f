"""Sums over all cells' reports of a step, which do not depend on the order of the reports."""

import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.plan import Cell
from bamboo_trainer.commit.step_report import combined, exact_terms
from bamboo_trainer.frames import Ready


@given(st.lists(st.floats(0, 1e60), max_size=30), st.randoms(use_true_random=False))
def test_an_exact_sum_does_not_depend_on_how_it_is_divided(numbers: list[float], rng: random.Random) -> None:
    cut = rng.randint(0, len(numbers))
    terms = [*exact_terms(numbers[:cut]), *exact_terms(numbers[cut:])]
    assert sum(map(Fraction, terms)) == sum(map(Fraction, numbers))
    assert math.fsum(terms) == math.fsum(numbers)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_exact_sum_of_what_is_not_finite_is_that(bad: float) -> None:
    assert not math.isfinite(math.fsum(exact_terms([1.0, bad, 2.0])))


def ready(pipeline: int, **facts: Any) -> Ready:
    return Ready(cell=Cell(pipeline, 0), squared_norm=[4.0], **({"losses": {}} | facts))


def test_losses_are_summed_exactly_whatever_their_order() -> None:
    one = ready(0, losses={0: 1e16, 1: 1.0}, weights={0: 1.0, 1: 2.0}, added={"a": [0.5]})
    other = ready(1, losses={2: -1e16}, weights={2: 1.0}, added={"a": [1e16, 2.5], "b": [-1e16]})
    result = combined([one, other])
    assert (result.loss, result.scale, result.norm, result.microbatches) == (1.0, 0.25, 0.5, 3)
    assert result.metrics == {"a": (1e16 + 3) / 4, "b": -1e16 / 4}
    assert combined([other, one]) == result


def test_what_is_no_number_is_told_as_none() -> None:
    assert combined([ready(0, losses={0: 1.0}, weights={0: 0.0})]).loss != 0
    for facts in ({"weights": {0: 0.0}}, {"weights": {0: 1e-320}}, {"added": {"a": [float("inf")]}}):
        loss = combined([ready(0, losses={0: 1.0}, **facts)]).loss
        assert math.isnan(loss)
    mixed = combined([ready(0, losses={0: 1.0}, weights={0: 1.0}), ready(1, losses={1: 1.0})])
    both = combined([ready(0, losses={0: float("inf"), 1: -float("inf")})])
    assert (mixed.loss != mixed.loss, both.loss != both.loss) == (True, True)
    assert combined([ready(0, losses={0: 1.0, 1: 2.0})]).loss == 1.5
