"""Shell completion of job names from the cluster. It never prints errors, and gives up after a few seconds."""

import asyncio

from bamboo import loop_signals
from bamboo_core.kube.api import Connection, KubeApi, log_in
from bamboo_core.kube.errors import RemoteError

SECONDS = 3.0
MOST = 200


def job_names(incomplete: str, namespace: str | None, context: str | None, path: str | None) -> list[str]:
    """Return at most MOST job names that begin with `incomplete`; [] on failure or after SECONDS."""
    try:
        found = loop_signals.run_until_stopped(lambda: _names(namespace, context, path))
    except (RemoteError, TimeoutError, asyncio.CancelledError):
        return []
    return sorted(name for name in found if name.startswith(incomplete))[:MOST]


async def _names(namespace: str | None, context: str | None, path: str | None) -> list[str]:
    async with asyncio.timeout(SECONDS):
        access = await log_in(path, context)
        async with KubeApi(Connection(access)) as api:
            return [job["metadata"]["name"] for job in await api.jobs(namespace or access.namespace)]
