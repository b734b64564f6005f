"""A job's calls of the API server, any of which may fail: logged, tried again, and refusals told to the user."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection

from bamboo_core.coordinator.events import Emit
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.kube.refusals import PodRefused, described

logger = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.5, 15.0
LOG_AGAIN_SECONDS = 600.0  # of the same failure: it may last for days, and is among the job's events and conditions
GONE = (404, 409)  # there is no such object any more, or another one has its name


class ApiAttempts:
    """last_progress: when something was done for the job, or waited for, by time.monotonic(); long ago: it is stuck."""

    def __init__(self, key: JobKey) -> None:
        self._key = key
        self._refusal = ""  # the last one that was told
        self._logged: dict[str, tuple[str, float]] = {}  # by what was tried: the last failure, and when (monotonic)
        self.last_progress = time.monotonic()

    def heartbeat(self) -> None:
        self.last_progress = time.monotonic()

    def log_failure(self, what: str, error: RemoteError) -> None:
        """error: a RemoteError. One that goes on is logged once in a while; succeeded() ends it."""
        found, now = described(error), time.monotonic()
        before, at = self._logged.get(what, ("", -math.inf))
        if found != before or now - at >= LOG_AGAIN_SECONDS:
            self._logged[what] = found, now
            logger.warning("%s/%s: cannot %s: %s", *self._key, what, found)

    def succeeded(self, what: str) -> None:
        """If that fails again, it is another failure."""
        self._logged.pop(what, None)

    async def once(self, what: str, act: Awaitable[None], record: Callable[[Emit], None]) -> bool:
        """False if it failed: what the API server refuses must not hold up other work.

        A refusal is recorded as an event; once, also if the job trains again later.
        """
        self.heartbeat()
        try:
            await act
        except RemoteError as error:
            self.log_failure(what, error)
            self._tell_refusal(error, record)
            return False
        self.succeeded(what)
        return True

    async def until_done(
        self, what: str, act: Callable[[], Awaitable[None]], ends: Collection[int] = GONE
    ) -> ApiError | None:
        """Tried again and again. ends: statuses of an answer that is the end of it, and is returned."""
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

    def _tell_refusal(self, error: RemoteError, record: Callable[[Emit], None]) -> None:
        """Refused pods are left out: they are among the startup problems."""
        if isinstance(error, PodRefused) or not isinstance(error, ApiError) or error.status not in (403, 422):
            return
        if str(error) != self._refusal:
            self._refusal = str(error)
            record(Emit("ClusterRefuses", self._refusal, True))
