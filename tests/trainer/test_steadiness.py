"""Until when something is measured again."""

import math

import pytest

from bamboo_trainer.steadiness import Steadiness, spread

STEADY = Steadiness(bound=0.03, floor=1e-6, most=20)


def test_the_spread_is_of_the_median_and_not_of_the_times() -> None:
    """Four times as many tell it twice as well; one that is far off tells nothing."""
    some = [0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.0, 1.0]
    assert spread(some * 4) == pytest.approx(spread(some) / 2, rel=0.3)
    assert spread([1.0] * 9 + [50.0]) == 0.0
    assert spread([1.0] * 4) == spread([0.0] * 9) == math.inf


def test_it_is_measured_until_each_kind_is_known() -> None:
    quiet, loud = [1.0, 1.0, 1.01, 1.0, 1.0, 0.99], [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    assert STEADY.reached([quiet, quiet])
    assert not STEADY.reached([quiet, loud])
    assert STEADY.enough([quiet, quiet], left=0.1)
    assert not STEADY.enough([quiet, loud], left=0.1)


def test_it_is_given_up_after_so_many_times_or_seconds() -> None:
    loud = [1.0, 2.0, 1.0, 2.0, 1.0]
    assert STEADY.enough([loud], left=0.0)
    assert STEADY.enough([loud * 4], left=9.0)
    assert not STEADY.enough([loud], left=9.0)


def test_what_is_too_short_to_matter_is_steady() -> None:
    assert STEADY.reached([[1e-7, 5e-7, 1e-7, 5e-7, 1e-7, 5e-7]])
