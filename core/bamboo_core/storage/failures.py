"""Explanation of a store's exceptions in a few words, and whether a retry may help."""

import errno
from dataclasses import dataclass
from typing import Final

from bamboo_core.storage.url import without_secrets

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_PERMANENT: Final = {
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EFBIG,
    errno.EMSGSIZE,
    errno.ELOOP,
}
_NO_CREDENTIALS: Final = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
    "RefreshError",
    "TokenRetrievalError",
    "CredentialUnavailableError",
}
_UNREACHABLE: Final = {
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "HTTPClientError",
    "ServiceRequestError",
    "ServiceResponseError",
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
    "ServerDisconnectedError",
    "IncompleteReadError",
    "ResponseStreamingError",
}
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The cause of a store's failed call."""

    reason: str
    transient: bool = False  # a retry may succeed
    missing: bool = False  # the file does not exist


def explain(error: BaseException) -> Failure:
    """Explain an exception by its type, its errno or the response's status, in this order."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        detail = f" ({_said(error)})" if error.args and "bucket" in str(error).lower() else ""
        return Failure(reason=f"it is not there{detail}", missing=True)
    if isinstance(error, PermissionError) or status in (401, 403):
        return Failure(reason=f"permission denied ({_said(error)})")
    if names := {kind.__name__ for kind in type(error).__mro__}:
        if names & _NO_CREDENTIALS:
            return Failure(reason=f"no valid credentials in the environment ({_said(error)})", transient=True)
        if names & _UNREACHABLE or isinstance(error, ConnectionError):
            return Failure(reason=f"the store cannot be reached ({_said(error)})", transient=True)
    if isinstance(error, TimeoutError):
        return Failure(reason=f"the store did not answer in time ({_said(error)})", transient=True)
    if status is not None:
        return Failure(
            reason=f"the store answered {status} ({_said(error)})", transient=status in (408, 429) or status >= 500
        )
    if isinstance(error, OSError):
        return _of_system(error)
    return Failure(reason=_said(error))


def _of_system(error: OSError) -> Failure:
    if error.errno in _FULL:
        return Failure(reason="no space left in the store")
    if error.errno == errno.EROFS:
        return Failure(reason="the file system is read-only")
    if isinstance(error, NotADirectoryError | IsADirectoryError | FileExistsError) or error.errno in _PERMANENT:
        return Failure(reason=_said(error))
    return Failure(reason=_said(error), transient=True)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the exception's response; None if it has none."""
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def _said(error: BaseException) -> str:
    """Return the exception's text in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    message = without_secrets(text)[:_LONGEST].strip().rstrip(".")
    return (
        message
        if isinstance(error, OSError) and message
        else f"{type(error).__name__}: {message}"
        if message
        else type(error).__name__
    )
