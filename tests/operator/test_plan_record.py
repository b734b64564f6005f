"""What a former operator had heard is read from the status."""

import pytest

from bamboo_operator.status.plan_record import lost_workers_in, start_record, task_digest_in, trains


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


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (None, False),
        ("", False),
        (start_record({"a"}), False),
        ('{"epoch":3,"pipelines":[["a"]],"lost":[]}', True),
        ('{"of":"another version"}', True),
        ("nonsense", True),
    ],
)
def test_a_record_of_workers_that_never_joined_is_no_plan(record: str | None, found: bool) -> None:
    assert trains(record) == found


def test_a_job_that_does_not_train_has_no_task_yet() -> None:
    assert task_digest_in(start_record({"b", "a"})) is None
    assert lost_workers_in(start_record({"b", "a"})) == {"a", "b"}
