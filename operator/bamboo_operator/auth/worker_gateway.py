"""The port to which workers connect: one for all jobs, with one path for each job."""

import ssl
from collections import Counter

from aiohttp import web

from bamboo_core.control.server import Authenticate, Channels, Unauthorized, Unavailable
from bamboo_core.planning.plan import WorkerId
from bamboo_core.serving.listener import BoundedListener, ConnectionBounds
from bamboo_operator.kube.objects import JobKey

BOUNDS = ConnectionBounds(unauthenticated=1024)


def workers_path(job: JobKey) -> str:
    namespace, name = job
    return f"/v1/jobs/{namespace}/{name}/workers"


class WorkerGateway:
    """The web server for workers. Each job opens its path while it accepts workers."""

    def __init__(self) -> None:
        self._open: dict[JobKey, Channels] = {}
        self.refusals: Counter[str] = Counter()  # by reason
        self._listener: BoundedListener | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, bounds: ConnectionBounds = BOUNDS
    ) -> int:
        """Listen, and return the port."""
        app = web.Application()
        app.router.add_get("/v1/jobs/{namespace}/{name}/workers", self._connect)
        self._listener = BoundedListener(app, bounds, self._closed)
        return await self._listener.start(host, port, tls)

    def _closed(self, reason: str) -> None:
        self.refusals[reason] += 1

    async def stop(self) -> None:
        for job, channels in list(self._open.items()):
            await self.close(job, channels)
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None

    @property
    def connected(self) -> int:
        """Return the number of connected workers."""
        return sum(len(channels.connected) for channels in tuple(self._open.values()))

    def counting_refusals(self, authenticate: Authenticate) -> Authenticate:
        """Wrap a check so that refused callers are counted by reason."""

        async def check(request: web.Request) -> WorkerId | None:
            try:
                return await authenticate(request)
            except Unauthorized as error:
                self.refusals[error.reason] += 1
                raise
            except Unavailable:
                self.refusals["NotChecked"] += 1
                raise

        return check

    def channels_of(self, job: JobKey) -> Channels | None:
        """Return the channels of a job's workers; None while its path is not open."""
        return self._open.get(job)

    def open(self, job: JobKey, channels: Channels) -> None:
        self._open[job] = channels

    def open_unless_open(self, job: JobKey, channels: Channels) -> None:
        """Open the job's path unless it is open already."""
        self._open.setdefault(job, channels)

    async def close(self, job: JobKey, channels: Channels) -> None:
        """Close a job's channels. The path stays open if a newer job of that name has opened it."""
        if self.channels_of(job) is channels:
            del self._open[job]
        await channels.close()

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        job = (request.match_info["namespace"], request.match_info["name"])
        channels = self.channels_of(job)
        if channels is None:
            self.refusals["NoSuchJob"] += 1
            raise web.HTTPNotFound(text="no such job here\n")
        if self._listener and self._listener.full:
            self.refusals["TooManyWorkers"] += 1
            limit = self._listener.bounds.known
            self._listener.warn(
                f"{limit} workers are connected: no more are accepted, the file descriptors are used up"
            )
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "5"})
        return await channels.handle(request)
