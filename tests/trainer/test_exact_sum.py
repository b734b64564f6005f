"""Sums that do not depend on the order."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.commit.exact_sum import exact_terms


@given(st.lists(st.floats(0, 1e60), max_size=30), st.randoms(use_true_random=False))
def test_an_exact_sum_does_not_depend_on_how_it_is_divided(numbers: list[float], rng: random.Random) -> None:
    cut = rng.randint(0, len(numbers))
    terms = [*exact_terms(numbers[:cut]), *exact_terms(numbers[cut:])]
    assert sum(map(Fraction, terms)) == sum(map(Fraction, numbers))
    assert math.fsum(terms) == math.fsum(numbers)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_exact_sum_of_what_is_not_finite_is_that(bad: float) -> None:
    assert not math.isfinite(math.fsum(exact_terms([1.0, bad, 2.0])))
