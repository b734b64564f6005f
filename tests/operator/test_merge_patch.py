"""JSON merge patches that give the wanted status, whether or not the previous write took effect."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bamboo_operator.status.merge_patch import either, merge_patch
from opsim_server import merged

VALUES = st.recursive(
    st.integers(0, 2) | st.just("") | st.lists(st.integers(0, 1), max_size=1),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(before=OBJECTS, tried=OBJECTS, new=OBJECTS)
def test_a_patch_makes_the_same_of_what_was_written_and_of_what_may_have_been(
    before: dict[str, Any], tried: dict[str, Any], new: dict[str, Any]
) -> None:
    possible = either(before, tried)
    for there in (before, merged(before, merge_patch(tried, before))):
        assert merged(there, merge_patch(new, possible)) == new
