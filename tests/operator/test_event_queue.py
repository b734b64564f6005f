"""Which events are kept for another try."""

import pytest

from bamboo.kube.errors import ApiError
from bamboo_operator.status.event_queue import may_be_posted_later


@pytest.mark.parametrize(
    ("status", "reason", "kept"),
    [(403, "Forbidden", True), (429, "TooManyRequests", True), (503, "Unavailable", True), (200, "NotJson", True),
     (422, "Invalid", False), (400, "BadRequest", False), (404, "NotFound", False)],
)  # fmt: skip
def test_an_event_that_will_never_be_accepted_is_dropped(status: int, reason: str, kept: bool) -> None:
    assert may_be_posted_later(ApiError(status, reason, "")) is kept
