"""The port to which the workers of all jobs connect, with a path for each job, and the port's certificate."""

import asyncio
import logging
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from bamboo_core.control.server import Authenticate, Channels, Unauthorized, Unavailable
from bamboo_core.planning.plan import WorkerId
from bamboo_core.serving.listener import BoundedListener, ConnectionBounds
from bamboo_operator.kube.objects import JobKey

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
BUFFER_BYTES = 16 << 10  # size of a full TLS record


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCertificate:
    """PEM files for TLS: the certificate chain, its private key, and the certificate authority that workers trust."""

    chain: Path
    key: Path
    authority: Path

    def context(self) -> ssl.SSLContext:
        """Return the server's TLS context, and shrink asyncio's TLS buffers. Raises OSError (also ssl.SSLError)."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.chain, self.key)
        # asyncio gives every connection a buffer of 256 KiB, which would be most of our memory with hundreds of workers
        sslproto.SSLProtocol.max_size = BUFFER_BYTES
        return context

    def trusted(self) -> str:
        """Return the authority's PEM text. Raises OSError (also ssl.SSLError) or ValueError for a bad file."""
        text = self.authority.read_text("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
        return text

    async def keep_fresh(self, context: ssl.SSLContext) -> None:
        """Reload the certificate for new connections whenever its files change; run until cancelled."""
        seen = self._stamp()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if (now := self._stamp()) != seen:
                    context.load_cert_chain(self.chain, self.key)
                    seen = now
                    logger.info("a new certificate is in use")
            except OSError as error:
                logger.warning("cannot load the new certificate: %s", error)

    def _stamp(self) -> tuple[float, float] | None:
        """Return when each file was last modified; None while one of them cannot be read."""
        try:
            return self.chain.stat().st_mtime, self.key.stat().st_mtime
        except OSError:
            return None  # `keep_fresh` logs the reason when it loads the files


BOUNDS = ConnectionBounds(unauthenticated=1024)


def workers_path(job: JobKey) -> str:
    namespace, name = job
    return f"/v1/jobs/{namespace}/{name}/workers"


class WorkerGateway:
    """The web server to which workers connect. Each job opens its path (`workers_path`) while it accepts workers."""

    def __init__(self) -> None:
        self._open: dict[JobKey, Channels] = {}
        self._for_closed: Callable[[JobKey, web.Request], Channels | None] = lambda job, request: None
        self.refusals: Counter[str] = Counter()  # by reason
        self._listener: BoundedListener | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, bounds: ConnectionBounds = BOUNDS
    ) -> int:
        """Listen and return the port. tls: None for unencrypted connections."""
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
        """The number of workers connected to the channels of open paths."""
        return sum(len(channels.connected) for channels in tuple(self._open.values()))

    def counting_refusals(self, authenticate: Authenticate) -> Authenticate:
        """Wrap a check of callers so that refusals are counted by reason; return the wrapped check."""

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

    def serve_closed_paths(self, channels_for: Callable[[JobKey, web.Request], Channels | None]) -> None:
        """Set the function that returns the channels for a caller whose job has no open path, or None to refuse the
        caller.
        """
        self._for_closed = channels_for

    def channels_for(self, job: JobKey, request: web.Request) -> Channels | None:
        """Return the channels that serve a caller; None to refuse the caller."""
        return self.channels_of(job) or self._for_closed(job, request)

    async def close(self, job: JobKey, channels: Channels) -> None:
        """Close a job's channels, and its path unless a newer job of that name has opened it again."""
        if self.channels_of(job) is channels:
            del self._open[job]
        await channels.close()

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        job = (request.match_info["namespace"], request.match_info["name"])
        channels = self.channels_for(job, request)
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
