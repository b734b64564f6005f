"""Prices that are read anew while jobs run, from a file, such as one of a ConfigMap, or from a URL."""

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from bamboo_core.complaints import said_by
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.yaml_file import MAX_BYTES, source_of
from bamboo_core.prices.price_list import PriceError, PriceList, parse_prices, read_prices
from bamboo_core.storage.url import shown_url, without_secrets
from bamboo_operator.followed_list import FollowedList, UnreadableList

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


class PriceSource(FollowedList[PriceList]):
    """Alone writes the operator's prices. address: None if nobody tells any."""

    def __init__(self, address: PriceAddress | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        reader = None if address is None else PriceReader(address, timeout)
        super().__init__("prices", "until there are some, what manifests say counts", reader)


class PriceReader:
    """Reads prices once (`ListReader`). timeout: seconds of a request."""

    def __init__(self, address: PriceAddress, timeout: float = TIMEOUT_SECONDS) -> None:
        self._address, self._timeout = address, timeout

    def __str__(self) -> str:
        return str(self._address)

    @property
    def seconds(self) -> float:
        return self._address.seconds

    async def read(self) -> PriceList:
        """Raises UnreadableList."""
        address = self._address
        try:
            if address.is_url:
                return await self._fetched(address)
            return await asyncio.to_thread(read_prices, address.text)
        except (PriceError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnreadableList(self._reason(address, error)) from None

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
