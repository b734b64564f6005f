"""An asyncio client of the Kubernetes API: requests and endless watches."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from cluster import kubeconfig
from cluster.client import MERGE, STRATEGIC, ApiError, Json

__all__ = ["MERGE", "STRATEGIC", "Api", "ApiError", "Json"]

logger = logging.getLogger(__name__)

WATCH_SECONDS = 300
RETRY_SECONDS = 0.2
Failure = (ApiError, aiohttp.ClientError, TimeoutError)


class Api:
    def __init__(self, path: Path) -> None:
        self._access = kubeconfig.read(path)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._access.tls, limit=100)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def text(
        self, method: str, path: str, body: Json | None = None, *, content: str = "application/json", **query: str
    ) -> str:
        assert self._session is not None
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content}
        url = self._access.server + path
        async with self._session.request(method, url, params=query, data=data, headers=headers) as response:
            answer = await response.text()
            if response.status >= 400:
                raise ApiError.of(response.status, answer)
            return answer

    async def request(self, method: str, path: str, body: Json | None = None, **options: Any) -> Json:
        answer: Json = json.loads(await self.text(method, path, body, **options))
        return answer

    async def get(self, path: str, **query: Any) -> Json:
        return await self.request("GET", path, **query)

    async def find(self, path: str) -> Json | None:
        """Return an object; None if it does not exist."""
        try:
            return await self.get(path)
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    async def watch(self, path: str, **query: str) -> AsyncIterator[tuple[str, list[Json]]]:
        """Watch objects: yield ("LIST", all) first and after interruptions, and (type, [object]) for each change."""
        while True:
            try:
                listed = await self.get(path, **query)
                yield "LIST", listed["items"]
                async for event in self._follow(path, listed["metadata"]["resourceVersion"], query):
                    yield event["type"], [event["object"]]
            except Failure as error:
                logger.warning("watch of %s: %r", path, error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, path: str, version: str, query: dict[str, str]) -> AsyncIterator[Json]:
        """Yield watch events until the objects must be listed again: then return, or raise a `Failure`."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_read=WATCH_SECONDS + 30)
        while True:
            parameters = {**query, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
            parameters["timeoutSeconds"] = str(WATCH_SECONDS)
            url = self._access.server + path
            async with self._session.get(url, params=parameters, timeout=timeout) as response:
                if response.status != 200:
                    raise ApiError.of(response.status, await response.text())
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for event in map(json.loads, lines):
                        if event["type"] == "ERROR":
                            return
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            yield event
