"""Jobs whose image no node can pull: what their kubelets say, and how soon the jobs' statuses say it."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from _plane import Api, Json

PULL_SECONDS = (0.5, 5.0)  # from a pod's node to the first refusal
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 10.0, 300.0  # a kubelet's
SYNC_SECONDS = 3.0  # from a try to the kubelet's next look, when it finds that it has to wait
TOLD_SECONDS = 300.0
REASON = "ImagePullBackOff"
Write = Callable[[Json], Awaitable[None]]  # a container's state, to the pod's status


async def cannot_pull(image: str, rng: random.Random, write: Write) -> None:
    """Tries to pull an image for ever, and waits longer and longer for the next time."""
    error = f'failed to pull and unpack image "{image}": failed to resolve reference: not found'
    backoff = FIRST_BACKOFF_SECONDS
    await asyncio.sleep(rng.uniform(*PULL_SECONDS))
    while True:
        await write({"waiting": {"reason": "ErrImagePull", "message": error}})
        await asyncio.sleep(SYNC_SECONDS)
        waits = f'Back-off pulling image "{image}": ErrImagePull: {error}'
        await write({"waiting": {"reason": REASON, "message": waits}})
        await asyncio.sleep(backoff)
        backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)


class Told:
    """The moments at which each job's status was first seen to say that its workers cannot start (monotonic clock), by
    name.
    """

    def __init__(self, api: Api, jobs: str) -> None:
        self._api, self._jobs = api, jobs
        self.at: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raises what the watch has failed with."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self) -> None:
        async for _, jobs in self._api.watch(self._jobs):
            for job in jobs:
                conditions = (job.get("status") or {}).get("conditions") or ()
                if any(c["type"] == "WorkersReady" and c["reason"] == REASON for c in conditions):
                    self.at.setdefault(job["metadata"]["name"], time.monotonic())

    async def all_of(self, count: int) -> None:
        """Waits until so many jobs have said so; at most for five minutes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_SECONDS):
                while len(self.at) < count:
                    await asyncio.sleep(0.1)
