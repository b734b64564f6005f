"""Deletions that no watch has reported: after an interruption kopf lists again, which shows only what is there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, TypeVar

from bamboo_core.kube.errors import RemoteError
from bamboo_operator.kube.refusals import described

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0  # from the last object of a listing until it counts as complete
K = TypeVar("K", bound=Hashable)


class Resync(Generic[K]):
    """Reads what was not in the newest listing from the API server, and reports it as deleted if it is not there.

    known: by key, the uid of everything that is thought to exist. uid_of: the uid of what exists now, or None.
    deleted: called for what does not. The objects of one listing come one after the other, each with event type None.
    """

    def __init__(
        self,
        known: Callable[[], Mapping[K, str]],
        uid_of: Callable[[K], Awaitable[str | None]],
        deleted: Callable[[K], None],
    ) -> None:
        self._known, self._uid_of, self._deleted = known, uid_of, deleted
        self._listing = 0  # its number
        self._observed: dict[K, int] = {}  # in which listing, or after which
        self._timer: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None

    def observed(self, kind: str | None, key: K) -> None:
        """An event of that object came."""
        if kind is None:
            if self._timer is None:
                self._listing += 1
            self._check_later()
        if kind == "DELETED":
            self._observed.pop(key, None)
        else:
            self._observed[key] = self._listing

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)

    def _check_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._listing_ended)

    def _listing_ended(self) -> None:
        self._timer = None
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="check what was not listed")
        else:
            self._check_later()

    async def _check(self) -> None:
        known, listing = self._known(), self._listing
        self._observed = {key: number for key, number in self._observed.items() if key in known}
        unlisted = {key: uid for key, uid in known.items() if self._observed.get(key, 0) < listing}
        for key, uid in unlisted.items():
            try:
                there = await self._uid_of(key)
            except RemoteError as error:
                logger.warning("cannot ask for %s, which was not listed: %s", key, described(error))
                self._check_later()
                return
            if there == uid:
                self._observed[key] = max(self._observed.get(key, 0), listing)
            elif self._known().get(key) == uid:
                self._deleted(key)
