"""Deletions that no watch told of: after an interruption kopf lists anew, which tells only of what is still there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, TypeVar

from bamboo_operator.api import API_ERRORS

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0  # from the last word of a listing until its end is taken for sure
K = TypeVar("K", bound=Hashable)


class Missed(Generic[K]):
    """What was not in the newest listing is asked for, and given up if it is not there any more.

    known: by key, the uid of everything that is thought to be there. uid_of: the uid of what is there now, or None.
    gone: called for what is not. The objects of one listing come one after the other, each with event type None.
    """

    def __init__(
        self,
        known: Callable[[], Mapping[K, str]],
        uid_of: Callable[[K], Awaitable[str | None]],
        gone: Callable[[K], None],
    ) -> None:
        self._known, self._uid_of, self._gone = known, uid_of, gone
        self._listing = 0  # its number
        self._seen: dict[K, int] = {}  # in which listing, or after which
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def seen(self, kind: str | None, key: K) -> None:
        """An event of that object came."""
        if kind is None:
            if self._timer is None:
                self._listing += 1
            self._later()
        if kind == "DELETED":
            self._seen.pop(key, None)
        else:
            self._seen[key] = self._listing

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._listed)

    def _listed(self) -> None:
        self._timer = None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="ask for what was not listed")
        else:
            self._later()

    async def _ask(self) -> None:
        known, listing = self._known(), self._listing
        self._seen = {key: number for key, number in self._seen.items() if key in known}
        unlisted = {key: uid for key, uid in known.items() if self._seen.get(key, 0) < listing}
        for key, uid in unlisted.items():
            try:
                there = await self._uid_of(key)
            except API_ERRORS as error:
                logger.warning("cannot ask for %s, which was not listed: %s", key, error or type(error).__name__)
                self._later()
                return
            if there == uid:
                self._seen[key] = max(self._seen.get(key, 0), listing)
            elif self._known().get(key) == uid:
                self._gone(key)
