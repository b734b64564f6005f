"""The operator from its start to its end: what there is, and in which order it begins and ends."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import kopf
from prometheus_client import CollectorRegistry, ProcessCollector

from bamboo.control.descriptors import DescriptorShares, raise_limit
from bamboo.control.listener import ConnectionBounds
from bamboo.metrics.exposition import Exporter, MetricsPageCollector
from bamboo_operator import page
from bamboo_operator.active import ActiveLabel
from bamboo_operator.api import API_ERRORS, AUTHORITY_FILE, Api, credentials
from bamboo_operator.authority import Authority
from bamboo_operator.cluster import Cluster
from bamboo_operator.counts import Calls
from bamboo_operator.doors import REVIEWS_AT_ONCE, Doors, JobKey, Reviews
from bamboo_operator.lease import CONNECTIONS, Lease, LeaseLost, Place
from bamboo_operator.lifecycle import Tools
from bamboo_operator.looks import Look
from bamboo_operator.metrics import Sources
from bamboo_operator.node_marks import NodeMark
from bamboo_operator.pods import OperatorSettings
from bamboo_operator.tls import Certificate
from bamboo_operator.watch import Lives, registry, settings
from bamboo_operator.watchers import Watchers
from bamboo_operator.web import Web

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 3.0
RESERVED = 160  # file descriptors: calls to the API server, files, what libraries open
WATCHES = 6  # of a namespace: connections of its watches, also while one is begun anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """url: under which workers reach this process; by default its own address.

    lease: None if there can be no other operator. identity: of this one as its holder. label_active: its pod, while
    it works; those that wait are ready, too.
    """

    listen: tuple[str, int]
    web_listen: tuple[str, int]
    url: str | None
    key: bytes
    workers: OperatorSettings
    namespaces: list[str]
    certificate: Certificate | None
    lease: Place | None
    identity: str
    marks: tuple[NodeMark, ...] = ()
    label_active: bool = False


async def operate(options: Options, stop: asyncio.Event) -> None:
    """Until stop is set. Raises OSError if an address cannot be had, LeaseLost if another operator works now."""
    await _Operation(options, stop).run()


class _Operation:
    """Health and metrics are there from the start; what only one operator may do begins when the lease is held."""

    def __init__(self, options: Options, stop: asyncio.Event) -> None:
        self._options, self._stop = options, stop
        self._settings = settings()
        info = credentials(self._settings)
        self._calls, self._series = Calls(), CollectorRegistry()
        self._api, self._reviewer = Api(info, calls=self._calls), Api(info, REVIEWS_AT_ONCE, self._calls)
        self._visitors = Api(info, page.AT_ONCE, self._calls)  # NB: of their own, so that they are in nobody's way
        self._renewer = Api(info, CONNECTIONS, self._calls)  # likewise
        self._lease = Lease(self._renewer, options.lease, options.identity) if options.lease else None
        self._active: ActiveLabel | None = None
        if options.lease and options.label_active:
            self._active = ActiveLabel(self._renewer, options.lease, options.identity)
        self._doors, self._watchers = Doors(), Watchers()
        self._lives: Lives | None = None
        self._works = False
        self._closing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        limit = raise_limit()
        self._shares = DescriptorShares.of(limit, RESERVED + WATCHES * max(1, len(options.namespaces)))
        logger.info("%d file descriptors: enough for %d workers", limit, self._shares.workers)
        bounds = ConnectionBounds(unauthenticated=self._shares.visitors)
        self._web = Web(self._problem, self._absence, self._series, bounds)
        page.Pages(self._look, self._visitors).add_to(self._web.app)

    async def run(self) -> None:
        try:
            await self._web.start(*self._options.web_listen)
            self._begin(self._end_with_authority(Authority(AUTHORITY_FILE)))
            if self._active:
                await self._active.give_up(first=True)
            if self._lease is None or await self._turn(self._lease):
                await self._work(await self._open())
        finally:
            await self._close()
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    # what others ask of it

    def _problem(self) -> str | None:
        return self._watchers.lost() or (self._lives.stuck() if self._lives else None)

    def _absence(self) -> str | None:
        """Why workers cannot come; None also for one of several operators that stands by: they come to another."""
        if self._works or (self._active and self._lease and self._lease.stands_by):
            return None
        return (self._lease.waiting if self._lease else None) or "starting or ending"

    def _look(self, job: JobKey) -> Look | None:
        return self._lives.look(job) if self._lives else None

    # the lease

    async def _turn(self, lease: Lease) -> bool:
        """Until this operator may work; False if it is to stop before."""
        if not await done_before(self._stop, lease.acquire()):
            return False
        self._begin(self._keep(lease))
        return await done_before(self._stop, lease.settle())

    async def _keep(self, lease: Lease) -> None:
        """Without the lease nothing may be decided: workers are let go at once, before kopf has ended."""
        try:
            await lease.keep()
        except LeaseLost as error:
            logger.error("%s: this operator stops", error)
            raise
        finally:
            self._stop.set()
            await self._fall_silent()

    async def _end_with_authority(self, authority: Authority) -> None:
        await authority.change()
        logger.warning(
            "the cluster has a new certificate authority (%s): this operator ends, to be restarted", AUTHORITY_FILE
        )
        self._stop.set()

    # what is done with it

    async def _open(self) -> kopf.OperatorRegistry:
        """The workers' port, and the handlers of what kopf hears."""
        options = self._options
        tls = options.certificate.context() if options.certificate else None
        if options.certificate and tls:
            self._begin(options.certificate.keep_fresh(tls))
        bounds = ConnectionBounds(unauthenticated=self._shares.unauthenticated, known=self._shares.workers)
        bound = await self._doors.start(*options.listen, tls, bounds)
        own = f"{'wss' if tls else 'ws'}://{options.listen[0]}:{bound}"
        tools = Tools(
            cluster=Cluster(), doors=self._doors, api=self._api, reviews=Reviews(self._reviewer), key=options.key,
            url=options.url or own, settings=options.workers, marks=options.marks,
        )  # fmt: skip
        lives = self._lives = Lives(tools)
        sources = Sources(lives=lives.living, doors=self._doors, calls=self._calls, counts=tools.counts)
        self._series.register(MetricsPageCollector(Exporter.OPERATOR, sources.fill))
        ProcessCollector(registry=self._series)
        handlers = registry(lives, tools)

        @kopf.on.login(id="login", registry=handlers)
        async def login(**_: object) -> kopf.ConnectionInfo:
            return credentials(self._settings)

        logger.info("listening on %s:%d; workers connect to %s", options.listen[0], bound, tools.url)
        return handlers

    async def _work(self, handlers: kopf.OperatorRegistry) -> None:
        """Until stop is set, a signal comes, or kopf fails.

        NB: kopf ends all tasks that were begun later than itself.
        """
        self._works = not self._stop.is_set()
        if self._works and self._active and self._lease:
            self._begin(self._active.take(self._lease.predecessors))
        await kopf.operator(
            registry=handlers,
            settings=self._settings,
            standalone=True,
            clusterwide=not self._options.namespaces,
            namespaces=self._options.namespaces,
            stop_flag=self._stop,
        )

    # the end

    async def _fall_silent(self) -> None:
        """No job has a brain any more, and no worker a channel. As often as one likes."""
        self._works = False
        async with self._closing:
            if self._lives:
                await self._lives.stop()
            await self._doors.stop()
            if self._active:
                await self._active.give_up()

    async def _close(self) -> None:
        await self._fall_silent()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease:
            try:
                async with asyncio.timeout(RELEASE_SECONDS):
                    await self._lease.release()
            except API_ERRORS as error:
                logger.warning("cannot release the lease: %s", str(error) or type(error).__name__)
        await self._web.stop()
        for api in (self._api, self._reviewer, self._visitors, self._renewer):
            await api.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))


async def done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether it was done before stop was set; else it is cancelled."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return False
        working.result()
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
