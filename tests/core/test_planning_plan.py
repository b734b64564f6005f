"""Validation of plans: each problem of a plan is named."""

from typing import Any

import msgspec
import pytest

from bamboo_core.planning.plan import Assignment, Portion, plan_problems
from replica_kit import peer, planned


def shared(*portions: tuple[str, int, int]) -> dict[str, Any]:
    """Return plan fields: two pipelines of one stage, the first one shared out in portions (worker, first, end)."""
    made = tuple(Portion(worker=worker, first=first, end=end) for worker, first, end in portions)
    return {"pipelines": ((Assignment(owner="w0", portions=made),), (Assignment(owner="w1"),))}


@pytest.mark.parametrize(
    ("grid", "changes", "problems"),
    [
        ((2, 1), {}, []),
        ((2, 1), {"workers": (peer("w0"),)}, ["w1, which is not a live worker"] * 2),
        ((2, 1), {"stages": ((0, 1), (2, 3))}, ["stages are not a partition"]),
        ((1, 2), shared(("w0", 1, 4)), ["not a partition"]),
        ((1, 2), shared(("w0", 0, 2), ("w1", 3, 4)), ["not a partition"]),
        ((1, 2), shared(("w0", 0, 2), ("w1", 2, 2)), ["not a partition"]),
        ((1, 2), shared(("w0", 0, 2), ("w9", 2, 4)), ["owns no cell"]),
    ],
)
def test_problems_of_a_plan_are_named(grid: tuple[int, int], changes: dict[str, Any], problems: list[str]) -> None:
    found = plan_problems(msgspec.structs.replace(planned(*grid, 1, "a"), **changes))
    assert len(found) == len(problems)
    assert all(problem in text for problem, text in zip(problems, found, strict=True))
