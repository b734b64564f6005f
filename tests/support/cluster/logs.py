"""A kubelet's HTTPS server for the logs of containers and for port forwarding over WebSockets."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from cluster import forward
from cluster.pki import Pair

Find = Callable[[str, str, str], Path | None]
Locate = Callable[[str, str], str | None]
FOLLOW_SECONDS = 0.1


class LogServer:
    """The HTTPS server. find: returns the log file of (namespace, pod, container), or None. locate: returns the
    address of (namespace, pod), or None.
    """

    def __init__(self, find: Find, locate: Locate, certificate: Pair, port: int) -> None:
        self.find, self.locate, self.port = find, locate, port
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._answer)
        app.router.add_get("/portForward/{namespace}/{pod}", self._forward)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate.certificate, certificate.key)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)

    async def open(self) -> None:
        await self._runner.setup()

    async def listen(self, address: str) -> None:
        await web.TCPSite(self._runner, address, self.port, ssl_context=self._tls).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        address = self.locate(request.match_info["namespace"], request.match_info["pod"])
        if address is None:
            raise web.HTTPNotFound(text="this pod does not run")
        return await forward.serve(request, address, int(request.query["port"]))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = self.find(*(request.match_info[name] for name in ("namespace", "pod", "container")))
        if path is None:
            raise web.HTTPNotFound(text="this container has no log")
        content = path.read_bytes()
        position = len(content)
        if tail := request.query.get("tailLines"):
            content = b"".join(content.splitlines(keepends=True)[-int(tail) :]) if int(tail) else b""
        response = web.StreamResponse()
        response.content_type = "text/plain"
        await response.prepare(request)
        await response.write(content)
        if request.query.get("follow") == "true":
            await self._follow(path, position, response)
        return response

    async def _follow(self, path: Path, position: int, response: web.StreamResponse) -> None:
        with path.open("rb") as file:
            file.seek(position)
            while True:
                if more := file.read():
                    await response.write(more)
                else:
                    await asyncio.sleep(FOLLOW_SECONDS)
