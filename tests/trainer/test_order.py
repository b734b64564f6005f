"""The order of samples: a permutation for each pass, divided into steps and microbatches."""

from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.data import permute, sample_numbers


@given(st.integers(1, 700), st.integers(0, 2**63 - 1))
def test_the_permutation_is_a_bijection(length, key):
    assert sorted(permute(i, length, key) for i in range(length)) == list(range(length))


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_microbatches_make_up_the_step_and_epochs_visit_every_sample_once(seed, length, count, size, step):
    batch = count * size
    parts = [sample_numbers(seed, step * batch + m * size, size, length) for m in range(count)]
    assert sum(parts, ()) == sample_numbers(seed, step * batch, batch, length)
    visited = sample_numbers(seed, 0, 2 * length, length)
    assert sorted(visited[:length]) == sorted(visited[length : 2 * length]) == list(range(length))
