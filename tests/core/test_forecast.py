"""What a job will have cost with its last step."""

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.page.forecast import at_the_end

AMOUNTS = st.floats(0, 1e9)


@given(AMOUNTS, AMOUNTS, st.floats(-1e6, 1e9))
def test_it_is_never_less_than_what_is_paid(so_far: float, per_hour: float, seconds_left: float) -> None:
    found = at_the_end(so_far, per_hour, seconds_left)
    assert found is not None
    assert found >= so_far
