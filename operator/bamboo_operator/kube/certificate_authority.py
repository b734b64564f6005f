"""Whether the cluster's certificate authority is still the one that this process began with.

The kubelet brings a new one into the pod's folder. Neither kopf nor our own client takes it up, so the operator has to
be started again; else it could no longer reach the API server some day.
"""

import asyncio
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0


class ClusterAuthority:
    """path: of the authority's certificate in the pod."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = self._read()

    async def changed(self) -> None:
        """Waits until there is another one; for ever if there was none, as outside a cluster."""
        if self._first is None:
            await asyncio.Event().wait()
        while self._read() in (None, self._first):
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read the cluster's authority: %s", error)
            return None
