"""Prices that are read anew while jobs run, from a file, such as one of a ConfigMap, or from a URL.

What cannot be read, or is not as it should be, changes nothing: the last good prices stay, and it is said once.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from bamboo_core.complaints import said_by
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.yaml_file import MAX_BYTES, source_of
from bamboo_core.prices.price_list import PriceError, PriceList, parse_prices, read_prices
from bamboo_core.storage.url import shown_url, without_secrets

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 10.0  # of a request, with its answer
MOST_REDIRECTS: Final = 3
SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceAddress:
    """Where prices are read from, and how often."""

    text: str  # a file, the name of a list that comes with Bamboo, or a URL
    seconds: float  # from one reading to the next

    @classmethod
    def parse(cls, text: str, seconds: float) -> "PriceAddress":
        """Raises ValueError with what was expected."""
        scheme, separator, _ = text.partition("://")
        if separator and (scheme.lower() not in SCHEMES or not urlsplit(text).hostname):
            raise ValueError(f'expected a file, or a URL such as https://HOST/prices.yaml, got "{shown_url(text)}"')
        return cls(text=text, seconds=seconds)

    @property
    def is_url(self) -> bool:
        return "://" in self.text

    def __str__(self) -> str:
        """The text of the source without credentials."""
        return shown_url(self.text) if self.is_url else self.text


class PriceSource:
    """Alone writes the operator's prices. address: None if nobody tells any."""

    def __init__(self, address: PriceAddress | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        self._address, self._timeout = address, timeout
        self._said: str | None = None  # what was wrong last
        self._read_at: float | None = None  # time.monotonic()
        self._first_read = asyncio.Event()  # once, whatever was found
        self.current: PriceList | None = None

    @property
    def age(self) -> float | None:
        """Seconds since prices were read well; None if they never were."""
        return None if self._read_at is None else time.monotonic() - self._read_at

    async def run(self) -> None:
        """Reads the prices again and again, until it is cancelled."""
        while self._address is not None:
            await self.read()
            self._first_read.set()
            await asyncio.sleep(self._address.seconds)

    async def first_read(self, seconds: float) -> None:
        """Waits until prices were read for the first time, well or not, and for at most that many seconds."""
        if self._address is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._first_read.wait(), seconds)

    async def read(self) -> None:
        """Reads the prices; what is wrong with them is logged, and those of before stay in force."""
        if (address := self._address) is None:
            return
        try:
            found = (
                await self._fetched(address) if address.is_url else await asyncio.to_thread(read_prices, address.text)
            )
        except (PriceError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._complain(self._reason(address, error))
            return
        if self._said is not None or self.current is None:
            logger.info("prices of %s are read from %s", ", ".join(sorted(found.machines)[:8]), address)
        self._said, self._read_at, self.current = None, time.monotonic(), found

    def _reason(self, address: PriceAddress, error: Exception) -> str:
        """A sentence, without what is secret in a URL."""
        match error:
            case PriceError():
                return str(error)
            case TimeoutError():
                return f"{address}: no answer within {self._timeout:g} s"
            case aiohttp.TooManyRedirects():
                return f"{address}: redirected more than {MOST_REDIRECTS} times"
            case _:
                return without_secrets(f"{address}: {said_by(error)}")

    def _complain(self, text: str) -> None:
        if text == self._said:
            return
        kept = "those of before stay in force" if self.current else "until there are some, what manifests say counts"
        logger.warning("no new prices: %s; %s", text, kept)
        self._said = text

    async def _fetched(self, address: PriceAddress) -> PriceList:
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(address.text, max_redirects=MOST_REDIRECTS) as answer,
        ):
            if answer.status != 200:
                raise PriceError(f"{address}: answered {answer.status}")
            raw = b""
            async for part in answer.content.iter_chunked(1 << 16):
                raw += part
                if len(raw) > MAX_BYTES:
                    raise PriceError(f"{address}: larger than 1 MiB")
        try:
            document = source_of(str(address), raw.decode("utf-8-sig")).document
        except ManifestError as error:
            told = (str(one) if one.path != "manifest" else f"{address}: {one.message}" for one in error.problems)
            raise PriceError("; ".join(told)) from None
        except UnicodeDecodeError:
            raise PriceError(f"{address}: not UTF-8 text") from None
        return parse_prices(str(address), document)
