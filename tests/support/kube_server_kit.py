"""A small API server, and kubeconfigs that lead to it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.kubeconfig import Access


def ask(access: Access, call: Callable[[KubeApi], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with KubeApi(access) as api:
            return await call(api)

    return asyncio.run(run())
