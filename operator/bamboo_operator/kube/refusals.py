"""Refusals by the API server."""

from typing import Self

from bamboo_core.kube.errors import ApiError, RemoteError


class PodRefused(ApiError):
    """The API server refuses a pod as it is: because of a quota, an admission policy or a missing ServiceAccount."""

    @classmethod
    def of(cls, error: ApiError) -> Self | None:
        """Return the refusal, or None if the error is temporary or of another kind. A failing webhook gives 500."""
        if error.status in (400, 403, 422) or (error.status == 500 and error.reason == "InternalError"):
            return cls(error.status, error.reason, error.message)
        return None


def described(error: RemoteError) -> str:
    """Return the error for the log."""
    return f"{error} ({error.reason}, {error.status})" if isinstance(error, ApiError) else str(error)
