"""Deletions that no watch has reported: after an interruption kopf lists again, which shows only what exists."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from bamboo_core.kube.errors import RemoteError
from bamboo_operator.kube.refusals import described

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0
SETTLE_SECONDS = 5.0  # from a listing of kopf's to ours
Known = Mapping[str, Callable[[], None]]  # by UID: what is called when that object is gone
Kind = tuple[Callable[[], Known], Callable[[], Awaitable[Collection[str]]]]


class Resync:
    """A task that lists each kind of object again, and reports what is known and not listed as deleted.

    kinds: what is known, and a list of the UIDs that exist. What is known is looked up before the list is asked for, so
    whatever the list lacks is gone.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds, self._asked = kinds, asyncio.Event()

    def soon(self) -> None:
        """List again without waiting: kopf has listed, so a watch was interrupted or has begun."""
        self._asked.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), EVERY_SECONDS)
            await asyncio.sleep(SETTLE_SECONDS)
            self._asked.clear()
            for known, listed in self._kinds:
                if not (before := dict(known())):
                    continue
                try:
                    there = await listed()
                except RemoteError as error:
                    logger.warning("cannot list what is watched: %s", described(error))
                    self.soon()
                    continue
                for uid in before.keys() - there:
                    if (gone := known().get(uid)) is not None:
                        gone()
