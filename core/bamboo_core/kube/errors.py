"""Errors of access to a cluster. The text of a RemoteError is one sentence for the user."""

from bamboo_core.names import EXIT_FAILED, EXIT_USAGE


class RemoteError(Exception):
    """An error whose text is one sentence for the user. code: the command's exit code."""

    code = EXIT_FAILED


class ConfigError(RemoteError):
    """Error because the kubeconfig or its credentials are missing or unusable, or a flag that selects them is wrong."""

    code = EXIT_USAGE


class UsageError(RemoteError):
    """Error because a flag, argument or manifest is invalid or does not fit the job."""

    code = EXIT_USAGE


class ClusterUnreachable(RemoteError):
    """Error because the API server cannot be reached or trusted, or the token cannot be read. It may be temporary."""


class ApiError(RemoteError):
    """Error because the API server refused a call, or answered with something other than JSON.

    status: the HTTP code. reason: Kubernetes' reason, such as NotFound, or Bamboo's: NoNamespace, NoCrd, NotJson.
    message: the error's text; "" for a text that names status and reason.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or f"the API server answered {status} {reason}".rstrip())
        self.status, self.reason, self.message = status, reason, message

    @property
    def may_pass(self) -> bool:
        return self.status == 429 or self.status >= 500


class JobGone(Exception):
    """Error because the BambooJob was deleted, even if a new one has the same name."""
