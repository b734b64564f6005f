"""The operator's web server for users, probes and Prometheus: a separate port with plain HTTP, read-only."""

import asyncio
import logging
import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from bamboo_core.serving.listener import BoundedListener, ConnectionBounds

logger = logging.getLogger(__name__)

BOUNDS = ConnectionBounds(unauthenticated=256)
FRESH_SECONDS = 0.5  # scrapes within this time get the same answer


class WebServer:
    """The operator's web server.

    healthy: returns why the operator is unhealthy; None if it is healthy. ready: returns why workers cannot connect,
    which anyone may read; None if they can, here or at the active operator. Add routes to `app` before start().
    """

    def __init__(
        self,
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
        registry: CollectorRegistry,
        bounds: ConnectionBounds = BOUNDS,
    ) -> None:
        self._healthy, self._ready, self._registry = healthy, ready, registry
        self._scraping = asyncio.Lock()
        self._scraped, self._scraped_at = b"", 0.0
        self.app = web.Application()
        self._listener = BoundedListener(self.app, bounds)
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/readyz", self._readiness)
        self.app.router.add_get("/metrics", self._metrics)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port."""
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        await self._listener.stop()

    async def _health(self, _: web.Request) -> web.Response:
        problem = self._healthy()
        if problem:
            logger.error("not healthy: %s", problem)  # not in the answer, which anyone may read
        return web.Response(text="stuck\n" if problem else "ok\n", status=503 if problem else 200)

    async def _readiness(self, request: web.Request) -> web.Response:
        if reason := self._ready():
            return web.Response(text=f"{reason}\n", status=503)
        return await self._health(request)

    async def _metrics(self, _: web.Request) -> web.Response:
        """Answer with the metrics. A thread writes the page, since many jobs take a while; all callers within
        FRESH_SECONDS get the same page.
        """
        async with self._scraping:
            if time.monotonic() - self._scraped_at > FRESH_SECONDS:
                self._scraped = await asyncio.to_thread(generate_latest, self._registry)
                self._scraped_at = time.monotonic()
            return web.Response(body=self._scraped, headers={"Content-Type": CONTENT_TYPE_LATEST})
