"""Whether the API server serves Kueue's Workloads: Kueue may be installed while the operator runs.

kopf watches what there is when it begins. So the operator looks before that, and ends when there are Workloads later,
to be restarted.
"""

import asyncio
import logging

from bamboo_operator.kube.client import API_ERRORS, ApiClient, described

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
POLL_SECONDS = 60.0


class WorkloadKind:
    """The kind Workload, as far as the API server serves it."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def version(self) -> str | None:
        """The version to be used, None if there is none; as soon as the API server says it."""
        while True:
            try:
                return await self._api.workload_version()
            except API_ERRORS as error:
                logger.warning("cannot see whether there are Workloads of Kueue: %s", described(error))
            await asyncio.sleep(RETRY_SECONDS)

    async def until_served(self) -> None:
        """Waits until there is a version to be used, where there was none a moment ago."""
        await asyncio.sleep(POLL_SECONDS)
        while await self.version() is None:
            await asyncio.sleep(POLL_SECONDS)
