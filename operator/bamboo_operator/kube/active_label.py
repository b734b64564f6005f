"""The label on the pod of the active operator, by which the Service selects it.

Operators that wait for the Lease are ready, so that a Deployment with several replicas is available; traffic to the
Service must nevertheless reach the active one.
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
    """The label on an operator's pod. place: the Lease, whose namespace has the pods. me: this operator's pod."""

    def __init__(self, api: KubeApi, place: LeaseName, me: str) -> None:
        self._api, self._namespace, self._me = api, place.namespace, me
        self._set = False

    async def take(self, others: Iterable[str]) -> None:
        """Label this pod and remove the label from the others; retry until done or given up."""
        self._set = True
        for name in (*others, self._me):
            while self._set and not await self._label(name, "true" if name == self._me else None):
                await asyncio.sleep(RETRY_SECONDS)

    async def give_up(self, *, first: bool = False) -> None:
        """Remove this pod's label; try once. first: also a label that an earlier process may have left."""
        if self._set or first:
            self._set = False
            try:
                async with asyncio.timeout(LAST_TRY_SECONDS):
                    await self._label(self._me, None)
            except TimeoutError:
                logger.warning("cannot remove the label %s from %s in time", LABEL_ACTIVE, self._me)

    async def _label(self, name: str, value: str | None) -> bool:
        """Set or remove a pod's label; return whether that is done, also if the pod is gone."""
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
