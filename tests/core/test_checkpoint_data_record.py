"""Which differences between the data of two trainings are told, and how."""

import pytest
from msgspec.structs import replace

from bamboo_core.checkpoint.data_record import DataRecord, LookedAt, difference

FIRST = LookedAt(sample=0, form="int64 [8], int64 [8]", digest="a" * 16)
LAST = LookedAt(sample=399, form="int64 [8], int64 [8]", digest="b" * 16)
DATA = DataRecord(samples=400, order="0" * 16, looked_at=(FIRST, LAST))


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (DATA, None),
        (replace(DATA, samples=401, looked_at=(FIRST,)), ("400 samples", "401 samples")),
        (replace(DATA, samples=1, looked_at=(FIRST,)), ("400 samples", "1 sample")),
        (
            replace(DATA, order="1" * 16),
            ("an order of samples of digest 0000000000000000", "one of digest 1111111111111111"),
        ),
        (
            replace(DATA, looked_at=(FIRST, replace(LAST, form="int64 [9]"))),
            ("int64 [8], int64 [8] as sample 399", "int64 [9] as sample 399"),
        ),
        (
            replace(DATA, looked_at=(replace(FIRST, digest="c" * 16), LAST)),
            ("a sample 0 of digest aaaaaaaaaaaaaaaa", "a sample 0 of digest cccccccccccccccc"),
        ),
        (replace(DATA, looked_at=(replace(FIRST, digest=""), LAST)), None),
        (replace(DATA, looked_at=(LAST,)), None),
        (replace(DATA, looked_at=()), None),
    ],
)
def test_the_first_difference_is_told_with_both_sides(now: DataRecord, told: tuple[str, str] | None) -> None:
    assert difference(DATA, now) == told
