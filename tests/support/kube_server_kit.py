"""Access and calls to an API server that a test plays."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bamboo_core.kube.api import Access, Connection, KubeApi, log_in, new_configuration


def access_to(url: str) -> Access:
    """Return the access to a server without authentication."""
    found = new_configuration()
    found.host = url
    return Access(context="c", namespace="team", configuration=found)


def ask(kubeconfig: object, call: Callable[[KubeApi], Awaitable[Any]], context: str | None = None) -> Any:
    """Return the result of a call that logs in as a command does."""

    async def run() -> Any:
        async with KubeApi(Connection(await log_in(str(kubeconfig), context))) as api:
            return await call(api)

    return asyncio.run(run())


def connected(url: str, script: Callable[[Connection], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of a script that gets a connection to the server."""

    async def run() -> Any:
        connection = Connection(access_to(url), **options)
        try:
            return await script(connection)
        finally:
            await connection.close()

    return asyncio.run(run())
