"""Virtual time: everything happens at its moment, and in the order in which it was said."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bamboo.simulation.job.virtual_clock import VirtualClock


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_what_is_not_cancelled_happens_in_order(planned: list[tuple[int, bool]]) -> None:
    clock, seen = VirtualClock(), list[tuple[float, int]]()
    for number, (moment, cancelled) in enumerate(planned):
        timer = clock.at(moment, lambda number=number: seen.append((clock.now, number)))  # type: ignore[misc]
        if cancelled:
            timer.cancel()
    while clock.advance():
        pass
    expected = [(float(moment), number) for number, (moment, cancelled) in enumerate(planned) if not cancelled]
    assert seen == sorted(expected)
    assert clock.next == math.inf


def test_a_moment_that_has_passed_is_now_and_time_never_falls() -> None:
    clock, seen = VirtualClock(), list[float]()
    clock.at(3.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)) and None)
    assert clock.next == 3.0
    assert clock.advance()
    assert clock.next == 3.0
    clock.after(2.0, lambda: seen.append(clock.now))
    while clock.advance():
        pass
    assert seen == [3.0, 5.0]
    assert not clock.advance()
