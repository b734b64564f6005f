"""A list that people write for the operator, and that is read anew while jobs run.

What cannot be read, or is not as it should be, changes nothing: the last good one stays, and it is said once.
"""

import asyncio
import contextlib
import logging
import time
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Found = TypeVar("Found", covariant=True)


class UnreadableList(ValueError):
    """One sentence about what is wrong with a list, without what is secret in its address."""


class ListReader(Protocol[Found]):
    """What reads a list once; as a text it is the list's address. seconds: from one reading to the next."""

    @property
    def seconds(self) -> float: ...

    async def read(self) -> Found:
        """Raises UnreadableList."""


class FollowedList(Generic[T]):
    """Alone writes the newest good version of a list. reader: None if nobody tells any.

    what: a word for what is in it; until_then: what counts as long as there is no good one, a sentence.
    """

    def __init__(self, what: str, until_then: str, reader: ListReader[T] | None) -> None:
        self._what, self._until_then, self._reader = what, until_then, reader
        self._said: str | None = None  # what was wrong last
        self._read_at: float | None = None  # time.monotonic()
        self._first_read = asyncio.Event()  # once, whatever was found
        self.current: T | None = None

    @property
    def age(self) -> float | None:
        """Seconds since it was read well; None if it never was."""
        return None if self._read_at is None else time.monotonic() - self._read_at

    async def run(self) -> None:
        """Reads it again and again, until it is cancelled."""
        while self._reader is not None:
            await self.read()
            self._first_read.set()
            await asyncio.sleep(self._reader.seconds)

    async def first_read(self, seconds: float) -> None:
        """Waits until it was read for the first time, well or not, and for at most that many seconds."""
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._first_read.wait(), seconds)

    async def read(self) -> None:
        """Reads it; what is wrong with it is logged, and the one of before stays in force."""
        if self._reader is None:
            return
        try:
            found = await self._reader.read()
        except UnreadableList as error:
            self._complain(str(error))
            return
        if self._said is not None or self.current is None:
            logger.info("%s are read from %s", self._what, self._reader)
        self._said, self._read_at, self.current = None, time.monotonic(), found

    def _complain(self, text: str) -> None:
        if text == self._said:
            return
        kept = "those of before stay in force" if self.current is not None else self._until_then
        logger.warning("no new %s: %s; %s", self._what, text, kept)
        self._said = text
