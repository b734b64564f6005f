"""Whether the API server knows BambooJobs at all: their CRD may be installed late, and deleted while the operator runs.

kopf watches what there is when it begins, and fails at a watch of what is gone. So it begins when there is a CRD, and
the operator ends without one, to be restarted and to wait.
"""

import asyncio
import logging
from collections.abc import Sequence

from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import GROUP, PLURAL
from bamboo_operator.kube.refusals import described

logger = logging.getLogger(__name__)

CRD = f"{PLURAL}.{GROUP}"
POLL_SECONDS = 2.0
NOT_FOUND = 404


class JobKind:
    """The kind BambooJob, as far as the API server serves it. namespaces: in which jobs are followed; all, if there are
    none. waiting: for what, while it waits.
    """

    def __init__(self, api: KubeApi, namespaces: Sequence[str]) -> None:
        self._api, self._namespace = api, next(iter(namespaces), None)
        self.waiting: str | None = None
        self._told = False

    async def served(self) -> bool:
        """Is there a CRD? True if the API server does not say."""
        try:
            return await self._api.serves_jobs(self._namespace)
        except RemoteError as error:
            logger.warning("cannot see whether there is a CRD %s: %s", CRD, described(error))
            return True

    async def until_served(self) -> None:
        """Waits until the API server serves the kind, and says so once if it has to wait."""
        while not await self.served():
            if self.waiting is None:
                self.waiting = f"waiting for the CRD {CRD}"
                logger.warning("there is no CRD %s: waiting until it is installed", CRD)
            await asyncio.sleep(POLL_SECONDS)
        if self.waiting is not None:
            logger.info("there is a CRD %s now", CRD)
        self.waiting = None

    def gone(self) -> None:
        """Say so, once: kopf's failure and the end of its watch may both be noticed."""
        if not self._told:
            logger.warning("the CRD %s is gone, and all jobs with it: this operator ends, to be restarted", CRD)
        self._told = True


class WatchesOfWhatIsGone(logging.Filter):
    """kopf writes a traceback if what it watches is not served any more. The operator says that in a sentence, and if
    it is something else that was not found, it ends with the exception itself.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (record.name.startswith("kopf") and getattr(error, "status", None) == NOT_FOUND)
