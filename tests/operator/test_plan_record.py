"""What a former operator had heard is read from the status."""

import pytest

from bamboo_operator.status.plan_record import lost_workers_in


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (None, set()),
        ("{}", set()),
        ("nonsense", set()),
        ('{"lost": 3}', set()),
        ("[]", set()),
        ('{"epoch": 3, "pipelines": [], "lost": ["a", 4]}', {"a"}),
    ],
)
def test_what_a_former_operator_had_heard_is_read_from_the_status(plan: str | None, lost: set[str]) -> None:
    assert lost_workers_in(plan) == lost
