"""Which of several operators' pods works, as a label that the Service selects by.

Those that wait for the Lease are ready, so that a Deployment with several replicas is as it should be; what is sent to
the Service must reach the one that works all the same.
"""

import asyncio
import logging
from collections.abc import Iterable

from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import LABEL_ACTIVE
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.kube.refusals import described

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
LAST_TRY_SECONDS = 3.0


class ActiveLabel:
    """place: of the Lease, in whose namespace the pods are. me: the name of this operator's pod."""

    def __init__(self, api: KubeApi, place: LeaseName, me: str) -> None:
        self._api, self._namespace, self._me = api, place.namespace, me
        self._set = False

    async def take(self, others: Iterable[str]) -> None:
        """This pod has it, and those others have it no more. Until that is done, or it is given up."""
        self._set = True
        for name in (*others, self._me):
            while self._set and not await self._label(name, "true" if name == self._me else None):
                await asyncio.sleep(RETRY_SECONDS)

    async def give_up(self, *, first: bool = False) -> None:
        """Once, and as well as can be. first: what an earlier process may have left in this pod."""
        if self._set or first:
            self._set = False
            try:
                async with asyncio.timeout(LAST_TRY_SECONDS):
                    await self._label(self._me, None)
            except TimeoutError:
                logger.warning("cannot remove the label %s from %s in time", LABEL_ACTIVE, self._me)

    async def _label(self, name: str, value: str | None) -> bool:
        """Whether it is as it should be, also because there is no such pod any more."""
        try:
            await self._api.label_pod(self._namespace, name, LABEL_ACTIVE, value)
        except ApiError as error:
            if error.status == 404:
                return True
            self._log_failure(name, error)
        except RemoteError as error:
            self._log_failure(name, error)
        else:
            return True
        return False

    def _log_failure(self, name: str, error: RemoteError) -> None:
        logger.warning("cannot label pod %s with %s: %s", name, LABEL_ACTIVE, described(error))
