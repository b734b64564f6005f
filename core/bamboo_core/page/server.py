"""A job's page over HTTP: static files for everybody, the document for authorized callers. Read-only.

The token is in the URL's fragment, which browsers do not send; the page's script sends it in a header with each request
for the document. So another site can neither read the document nor make the browser request it.
"""

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from bamboo_core.page.document import Document, encode

MOST_TOKEN = 8000  # characters, of a header's 8,190; a ServiceAccount's token has about 1,200
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}  # by suffix
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "bamboo",
}
LINGER_SECONDS = 1.5  # lets an open page learn how the job ended
WATCHED_SECONDS = 2.5  # a page that asked this recently is open
HOSTS = ("127.0.0.1", "localhost", "[::1]")


class PageError(Exception):
    """Error of a page that cannot be served; the text is a sentence for the user."""


def add_page(app: web.Application, prefix: str, state: Callable[[web.Request], Awaitable[web.Response]]) -> None:
    """Add the routes of a page to an application. prefix: the beginning of the page's URLs, with a slash at its end.
    state: handler that answers with the document, or refuses.
    """

    def serve(file: Traversable) -> Handler:
        body, kind = file.read_bytes(), TYPES[file.name.rpartition(".")[2]]

        async def handler(_: web.Request) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

        return handler

    for file in (resources.files("bamboo_core.page") / "static").iterdir():
        app.router.add_get(prefix + ("" if file.name == "index.html" else file.name), serve(file))
    app.router.add_get(prefix + "state", state)


def answer(document: Document) -> web.Response:
    return web.Response(body=encode(document), content_type="application/json", headers=HEADERS)


def refusal(status: int, sentence: str, **headers: str) -> web.Response:
    """Return an error response with a sentence for the user. status: the HTTP status. headers: more HTTP headers, with
    underscores for hyphens, such as Retry_After.
    """
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = msgspec.json.encode({"error": sentence})
    return web.Response(status=status, body=body, content_type="application/json", headers={**HEADERS, **named})


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the request's bearer token; None if it is missing, too long or not ASCII."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token if scheme == "Bearer" and 0 < len(token) <= MOST_TOKEN and token.isascii() else None


class LocalPage:
    """The server of a local run's page, on 127.0.0.1. document: returns the current document. port: 0 picks one."""

    def __init__(self, document: Callable[[], Document], *, port: int = 0) -> None:
        self._document, self._port = document, port
        self._token = secrets.token_urlsafe(18)
        self._runner: web.AppRunner | None = None
        self._asked: float | None = None
        self._end_shown = asyncio.Event()

    async def start(self) -> str:
        """Start serving; return the page's URL, including the token. Raises PageError if the port is not available."""
        try:
            sock = socket.create_server(("127.0.0.1", self._port))
        except OSError as error:
            raise PageError(f"--page-port {self._port}: {os.strerror(error.errno or 0)}") from None
        app = web.Application(middlewares=[_only_this_machine])
        add_page(app, "/", self._state)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()
        return f"http://127.0.0.1:{sock.getsockname()[1]}/#token={self._token}"

    async def stop(self) -> None:
        """Stop serving. If the job is over, first give an open page time to fetch the final document."""
        if self._watched() and self._document().state.over:
            try:
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._end_shown.wait()
            except TimeoutError:
                pass
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _watched(self) -> bool:
        return self._asked is not None and asyncio.get_running_loop().time() - self._asked < WATCHED_SECONDS

    async def _state(self, request: web.Request) -> web.Response:
        offered = bearer(request.headers) or ""
        if not hmac.compare_digest(offered.encode(), self._token.encode()):
            return refusal(401, "The token is not that of this run.", WWW_Authenticate="Bearer")
        self._asked = asyncio.get_running_loop().time()
        document = self._document()
        if document.state.over:
            asyncio.get_running_loop().call_soon(self._end_shown.set)
        return answer(document)


@web.middleware
async def _only_this_machine(request: web.Request, handler: Handler) -> Any:
    """Refuse requests whose Host header names another host (DNS rebinding), so that no other site shares our origin."""
    name = request.host.lower()
    name = name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.partition(":")[0]
    if name not in HOSTS:
        return refusal(421, "This page is for 127.0.0.1 and localhost only.")
    return await handler(request)
