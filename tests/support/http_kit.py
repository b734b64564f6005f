"""An HTTP server in the test's own event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(what: web.Application | Handler) -> AsyncIterator[str]:
    """Serve an application, or a handler of all methods and paths, and yield the URL."""
    if isinstance(what, web.Application):
        app = what
    else:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", what)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
