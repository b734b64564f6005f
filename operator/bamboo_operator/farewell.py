"""For workers that live although their job is over: who was to tell them had no time to, or did not reach them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bamboo.events import WorkerJoined
from bamboo.plan import WorkerId
from bamboo.protocol import Stop
from bamboo.server import ChannelEvent, Channels
from bamboo_operator.cluster import Cluster
from bamboo_operator.doors import Doors, JobKey, Reviews, pod_check


@asynccontextmanager
async def farewell(job: JobKey, uid: str, cluster: Cluster, doors: Doors, reviews: Reviews) -> AsyncIterator[None]:
    """Meanwhile the job's workers are let in, and told to stop."""

    def uid_of(worker: WorkerId) -> str | None:
        pod = cluster.pods(job, uid).get(worker)
        return str(pod["metadata"]["uid"]) if pod else None

    def hear(event: ChannelEvent) -> None:
        if isinstance(event, WorkerJoined):
            channels.send(event.hello.worker, Stop(reason="JobOver", message="the job is over"))

    channels = Channels(hear, doors.counted(pod_check(job, reviews, uid_of)))
    doors.open(job, channels)
    try:
        yield
    finally:
        await doors.close(job, channels)
