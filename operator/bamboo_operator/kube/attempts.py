"""API calls for a job or for the operator's own pod, tried once or until they succeed, with failures logged."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Self

from bamboo_core.coordinator.events import Emit
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_operator.kube.objects import JobKey


class PodRefused(ApiError):
    """Error because the API server refuses a pod, for example because of a quota or a missing ServiceAccount."""

    @classmethod
    def of(cls, error: ApiError) -> Self | None:
        """Return the error as a PodRefused if its status means that the API server refuses the pod; None otherwise. A
        failed admission webhook counts as a refusal (500, InternalError).
        """
        if error.status in (400, 403, 422) or (error.status == 500 and error.reason == "InternalError"):
            return cls(error.status, error.reason, error.message)
        return None


def described(error: RemoteError) -> str:
    """Return the error's text for the log, with the reason and status of an ApiError."""
    return f"{error} ({error.reason}, {error.status})" if isinstance(error, ApiError) else str(error)


logger = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.5, 15.0
LOG_AGAIN_SECONDS = 600.0  # between logs of one failure, which may last for days
GONE = (404, 409)  # the object is gone, or another one has its name


class ApiAttempts:
    """The API calls for one job, or for the operator's own pod, with retries and logs. last_progress: time.monotonic()
    of the newest call or heartbeat; long ago if the job is stuck.
    """

    def __init__(self, key: JobKey) -> None:
        self._key = key
        self._refusals: set[str] = set()  # the refusals that were recorded
        self._logged: dict[str, tuple[str, float]] = {}  # by attempt: the last failure and its time.monotonic()
        self.last_progress = time.monotonic()

    def heartbeat(self) -> None:
        self.last_progress = time.monotonic()

    def log_failure(self, what: str, error: RemoteError) -> None:
        """Log a failure, but repeat a text only after LOG_AGAIN_SECONDS or a success. what: completes "cannot ..."."""
        text, now = described(error), time.monotonic()
        before, at = self._logged.get(what, ("", -math.inf))
        if text != before or now - at >= LOG_AGAIN_SECONDS:
            self._logged[what] = text, now
            logger.warning("%s/%s: cannot %s: %s", *self._key, what, text)

    def succeeded(self, what: str) -> None:
        """Note a success: the next failure of the same attempt is logged again."""
        self._logged.pop(what, None)

    async def once(self, what: str, act: Awaitable[None], record: Callable[[Emit], None]) -> bool:
        """Await a call, and return whether it succeeded. Log a RemoteError instead of raising it.

        Also record each distinct refusal (403, 422) once, as an event for the user. Refused pods are not recorded,
        because startup problems report them.
        """
        self.heartbeat()
        try:
            await act
        except RemoteError as error:
            self.log_failure(what, error)
            refused = isinstance(error, ApiError) and error.status in (403, 422) and not isinstance(error, PodRefused)
            if refused and str(error) not in self._refusals:
                self._refusals.add(str(error))
                record(Emit("ClusterRefuses", str(error), True))
            return False
        self.succeeded(what)
        return True

    async def until_done(
        self, what: str, act: Callable[[], Awaitable[None]], ends: Collection[int] = GONE
    ) -> ApiError | None:
        """Repeat a call, with growing pauses, until it succeeds or fails with an HTTP status in `ends`. Return None
        after a success, else the ApiError with that status.
        """
        pause = FIRST_RETRY
        while True:
            self.heartbeat()
            try:
                await act()
            except RemoteError as error:
                if isinstance(error, ApiError) and error.status in ends:
                    return error
                self.log_failure(what, error)
            else:
                self.succeeded(what)
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY)
