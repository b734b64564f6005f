"""The Pareto front, against its definition."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bamboo.sizing.pareto import Point, dominates, front
from sizing_kit import POINTS


@given(POINTS)
def test_a_front_is_what_nothing_dominates(points: list[Point]) -> None:
    found = front(points, lambda point: point)
    assert set(found) == {one for one in points if not any(dominates(other, one) for other in points)}
    assert len(found) == len(set(found))


@given(POINTS, st.floats(0.01, 1.0))
def test_a_front_with_a_slack_is_what_nothing_beats_by_it(points: list[Point], slack: float) -> None:
    found = front(points, lambda point: point, slack)
    assert found == [one for one in points if not any(dominates(other, one, slack) for other in points)]


def test_what_never_ends_is_on_no_front_unless_nothing_ends() -> None:
    never = (math.inf, math.inf)
    assert front([never, (1.0, 1.0)], lambda point: point) == [(1.0, 1.0)]
    assert front([never, never], lambda point: point) == [never, never]
