"""What the API server refuses, as the operator reads it."""

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.kube.refusals import PodRefused


@pytest.mark.parametrize(
    ("status", "reason", "refused"),
    [
        (403, "Forbidden", True),
        (422, "Invalid", True),
        (400, "BadRequest", True),
        (500, "InternalError", True),  # a webhook that fails
        (500, "Timeout", False),
        (409, "AlreadyExists", False),
        (429, "TooManyRequests", False),
    ],
)
def test_what_passes_by_itself_is_no_refusal_of_a_pod(status: int, reason: str, refused: bool) -> None:
    found = PodRefused.of(ApiError(status, reason, "said"))
    assert (found is not None) == refused
    assert found is None or (found.status, found.message) == (status, "said")
