"""What the API server refuses, as the operator reads it."""

from typing import Self

from bamboo_core.kube.errors import ApiError, RemoteError


class PodRefused(ApiError):
    """The API server does not take a pod as it is: a quota, an admission policy, a ServiceAccount that is missing."""

    @classmethod
    def of(cls, error: ApiError) -> Self | None:
        """None if the error passes by itself, or is of something else. A webhook that fails gives 500."""
        if error.status in (400, 403, 422) or (error.status == 500 and error.reason == "InternalError"):
            return cls(error.status, error.reason, error.message)
        return None


def described(error: RemoteError) -> str:
    """Return the error for the log."""
    return f"{error} ({error.reason}, {error.status})" if isinstance(error, ApiError) else str(error)
