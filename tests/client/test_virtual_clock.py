"""Virtual time: actions run at their moment, in the order in which they were scheduled."""

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
    before = clock.now
    clock.at(before - 1.0, lambda: None)
    assert (clock.next, clock.advance(), clock.now) == (before, True, before), "a moment in the past is now"
