"""Resync: a periodic listing of the watched objects, which finds deletions that kopf's watches have missed.

It also detects broken watches: kopf must show every listed pod and node within LATE_SECONDS.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from bamboo_core.kube.errors import RemoteError
from bamboo_operator.kube.attempts import described

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0
SETTLE_SECONDS = 5.0  # from kopf's listing to this one
FIRST_SECONDS = 0.5  # the same, until kopf has shown all objects once
LATE_SECONDS = 120.0  # after which an object that kopf has not shown proves a broken watch
Known = Mapping[str, Callable[[], None]]  # by UID (of nodes also by name): the function to call when the object is gone


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind of object that kopf watches. known: returns the cached objects.

    listed: returns the keys, as in `Known`, of all objects. shown: whether kopf must show every listed object.
    """

    name: str
    known: Callable[[], Known]
    listed: Callable[[], Awaitable[Collection[str]]]
    shown: bool = True


class Resync:
    """A task that lists each kind of object and reports known objects missing from the list as deleted.

    It looks up the known objects first, so an object missing from the list is certainly gone. waiting: why the watches
    are not complete yet, as a sentence; None once they have shown all objects.
    """

    def __init__(self, kinds: Collection[Watched]) -> None:
        self._kinds, self._asked = kinds, asyncio.Event()
        self._unshown: dict[str, float] = {}  # UIDs, and since when (monotonic)
        self._fails = False
        self.waiting: str | None = "waiting for the watches"
        self._asked.set()

    def soon(self) -> None:
        """Request a resync within seconds, for example after kopf has restarted a watch and listed its objects."""
        self._asked.set()

    def problem(self) -> str | None:
        """Return a sentence about objects that kopf has not shown in time; None if there are none."""
        late = time.monotonic() - LATE_SECONDS
        count = sum(since < late for since in self._unshown.values())
        return f"the watches have not shown {count} objects for {LATE_SECONDS:g} s" if count else None

    async def run(self) -> None:
        """Resync every EVERY_SECONDS, and within seconds after a call of soon(), until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_SECONDS):
                    await self._asked.wait()
            await asyncio.sleep(FIRST_SECONDS if self.waiting else SETTLE_SECONDS)
            self._asked.clear()
            await self._resync()

    async def _resync(self) -> None:
        unshown, failure = set[str](), ""
        for kind in self._kinds:
            before = dict(kind.known())
            try:
                listed = set(await kind.listed())
            except RemoteError as error:
                failure = f"cannot list {kind.name}: {described(error)}"
                continue
            for uid in before.keys() - listed:
                if (gone := kind.known().get(uid)) is not None:
                    gone()
            if kind.shown:
                unshown |= listed - kind.known().keys()
        if failure and not self._fails:
            logger.warning("%s", failure)
        elif self._fails and not failure:
            logger.info("what is watched can be listed again")
        self._fails = bool(failure)
        if failure or unshown:
            self.soon()
        if self.waiting:
            self.waiting = failure or (f"waiting for the watches to show {len(unshown)} objects" if unshown else None)
        now = time.monotonic()
        self._unshown = {uid: self._unshown.get(uid, now) for uid in unshown}
