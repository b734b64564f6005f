"""Whether Kueue's Workloads can be followed: Kueue, or the right to list them, may come while the operator runs.

kopf watches what there is when it begins, and begins with no job before it has listed all that it watches. So the
operator looks before that, and ends when there are Workloads later, to be restarted.
"""

import asyncio
import logging

from bamboo_core.kube.errors import ApiError
from bamboo_core.names import LABEL_JOB_NAME
from bamboo_operator.kube.client import API_ERRORS, ApiClient, described

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
POLL_SECONDS = 60.0


class WorkloadKind:
    """The kind Workload, as far as the API server serves it. namespace: one in which jobs are followed; "": all are."""

    def __init__(self, api: ApiClient, namespace: str = "") -> None:
        self._api, self._namespace = api, namespace
        self._refusal = ""

    async def version(self) -> str | None:
        """The version to be used, None if there is none that may be listed; as soon as the API server says it."""
        while True:
            try:
                version = await self._api.workload_version()
                return version if version is not None and await self._may_be_listed(version) else None
            except API_ERRORS as error:
                logger.warning("cannot see whether there are Workloads of Kueue: %s", described(error))
            await asyncio.sleep(RETRY_SECONDS)

    async def until_served(self) -> None:
        """Waits until there is a version to be used, where there was none a moment ago."""
        await asyncio.sleep(POLL_SECONDS)
        while await self.version() is None:
            await asyncio.sleep(POLL_SECONDS)

    async def _may_be_listed(self, version: str) -> bool:
        """Not with the rights of a chart that is older, or has kueue.enabled: false; a refusal is said once."""
        try:
            await self._api.list_workloads(version, self._namespace, LABEL_JOB_NAME)
        except ApiError as error:
            if error.status != 403:
                raise
            if (refusal := str(error)) != self._refusal:
                logger.warning("no Workload of Kueue is followed: %s", refusal)
            self._refusal = refusal
            return False
        return True
