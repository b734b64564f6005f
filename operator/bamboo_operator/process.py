"""The operator's process from start to end: its parts, and the order in which they start and stop."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf
from prometheus_client import CollectorRegistry, ProcessCollector

from bamboo_core.complaints import said_by
from bamboo_core.kube.api import Access, Connection, KubeApi
from bamboo_core.kube.errors import RemoteError
from bamboo_core.metrics.exposition import MetricsPageCollector
from bamboo_core.serving.descriptors import DescriptorShares, raise_limit
from bamboo_core.serving.listener import ConnectionBounds
from bamboo_operator.auth.pod_tokens import REVIEWS_AT_ONCE, TokenReviewer
from bamboo_operator.auth.worker_gateway import ServingCertificate, WorkerGateway
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.http import job_pages
from bamboo_operator.http.metrics import MetricSources
from bamboo_operator.http.server import WebServer
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.access import (
    API_CONNECTIONS,
    AUTHORITY_FILE,
    ApiCallCounts,
    connect,
    kopf_login,
    operator_access,
)
from bamboo_operator.kube.lease import LEASE_CONNECTIONS, ActiveLabel, Lease, LeaseLost, LeaseName
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.signals.node_marks import NodeMark
from bamboo_operator.status.facts import OperatedJob
from bamboo_operator.watch_handlers import NOT_FOUND, kopf_settings, watch_handlers

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 3.0
LOGIN_SECONDS = 5.0  # between logins after a failure
RESERVED = 160  # file descriptors for API calls, files and libraries
WATCHES = 14  # connections for the watches of a namespace, also while one restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """The options of the operator's process."""

    listen: tuple[str, int]
    web_listen: tuple[str, int]
    url: str | None  # the address at which workers reach this process; None: that in `listen`
    key: bytes
    workers: WorkerPodSettings
    namespaces: list[str]
    certificate: ServingCertificate | None
    lease: LeaseName | None  # None if no other operator can exist
    identity: str  # this operator's name in the lease
    marks: tuple[NodeMark, ...] = ()
    label_active: bool = False  # label the active operator's pod; waiting ones are ready, too


def heed_unclosed_watches(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle exceptions of the operator's loop, but ignore exceptions of kopf's watches that the loop closes.

    A watch that kopf cancels in the middle of an event is closed only at the end of the loop. Its context manager may
    then raise RuntimeError ("generator didn't stop after athrow()"), but nothing leaks.
    """
    watch = context.get("asyncgen")
    if watch is not None and "kopf" in Path(watch.ag_code.co_filename).parts:
        logger.debug("a watch was closed with the loop: %s", context.get("exception"))
    else:
        loop.default_exception_handler(context)


async def run_operator(options: OperatorOptions, stop: asyncio.Event) -> None:
    """Run the operator until `stop` is set, a signal comes, or the CRD of BambooJobs is gone.

    Raises OSError (for an address or a certificate), LeaseLost, ConfigError, and kopf's errors.
    """
    await _Operator(options, stop, await operator_access()).run()


class _Operator:
    """The operator's process. Its web server runs from the start; all else waits for the lease, if it uses one."""

    def __init__(self, options: OperatorOptions, stop: asyncio.Event, access: Access) -> None:
        self._options, self._stop = options, stop
        self._access, self._connections = access, list[Connection]()
        self._calls, self._series = ApiCallCounts(), CollectorRegistry()
        self._api, self._reviewer = self._client(API_CONNECTIONS), self._client(REVIEWS_AT_ONCE)
        page_reviewer = self._client(job_pages.REVIEWS_AT_ONCE)  # separate, so that readers of pages delay nothing else
        renewer = self._client(LEASE_CONNECTIONS)  # likewise
        self._lease = Lease(renewer, options.lease, options.identity) if options.lease else None
        self._active: ActiveLabel | None = None
        if options.lease and options.label_active:
            self._active = ActiveLabel(renewer, options.lease, options.identity)
        self._gateway = WorkerGateway()
        self._authority = _authority()
        self._cluster = ClusterIndices()
        self._jobs: JobController | None = None
        self._works = False
        self._closing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        limit = raise_limit()
        self._shares = DescriptorShares.of(limit, RESERVED + WATCHES * max(1, len(options.namespaces)))
        logger.info("%d file descriptors: enough for %d workers", limit, self._shares.workers)
        bounds = ConnectionBounds(unauthenticated=self._shares.visitors)
        self._web = WebServer(self._problem, self._not_ready, self._series, bounds)
        job_pages.JobPages(self._known, page_reviewer).add_to(self._web.app)

    def _client(self, connections: int) -> KubeApi:
        self._connections.append(connect(self._access, self._calls, connections))
        return KubeApi(self._connections[-1])

    async def run(self) -> None:
        try:
            await self._web.start(*self._options.web_listen)
            if self._active:
                await self._active.give_up(first=True)
            if self._lease is None or await self._hold(self._lease):
                await self._work(await self._open())
        finally:
            await self._close()
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    # health, readiness and job pages

    def _problem(self) -> str | None:
        """Return why this process must restart; None if it is healthy. It must restart if the cluster's certificate
        authority has changed, which a client does not reload, or if a watch or a job is stuck.
        """
        if self._authority and _authority() not in (None, self._authority):
            return f"the cluster has a new certificate authority ({AUTHORITY_FILE})"
        return self._jobs.stuck() if self._jobs else None

    def _not_ready(self) -> str | None:
        """Return why workers cannot connect, or None. With `label_active` a standby operator returns None, too, since
        workers reach the active one.
        """
        if self._active and self._lease and self._lease.stands_by:
            return None
        if self._works and self._jobs:
            return self._jobs.resync.waiting
        return (self._lease.waiting if self._lease else None) or "starting or ending"

    def _known(self, job: JobKey) -> OperatedJob | None:
        return self._jobs.known(job) if self._jobs else None

    # the lease

    async def _hold(self, lease: Lease) -> bool:
        """Acquire the lease and wait until this operator may work; return False if `stop` is set before."""
        if not await done_before(self._stop, lease.acquire()):
            return False
        self._begin(self._renew(lease))
        return await done_before(self._stop, lease.settle())

    async def _renew(self, lease: Lease) -> None:
        """Renew the lease until cancelled. Whenever this ends, also by LeaseLost, set `stop` and disconnect workers at
        once, before kopf has ended.
        """
        try:
            await lease.keep()
        except LeaseLost as error:
            logger.error("%s: this operator stops", error)
            raise
        finally:
            self._stop.set()
            await self._stop_jobs()

    # work

    async def _open(self) -> kopf.OperatorRegistry:
        """Open the workers' port, create the job controller and its metrics, and return kopf's handlers."""
        options = self._options
        tls = options.certificate.context() if options.certificate else None
        if options.certificate and tls:
            self._begin(options.certificate.keep_fresh(tls))
        bounds = ConnectionBounds(unauthenticated=self._shares.unauthenticated, known=self._shares.workers)
        bound = await self._gateway.start(*options.listen, tls, bounds)
        own = f"{'wss' if tls else 'ws'}://{options.listen[0]}:{bound}"
        shared = SharedResources(
            cluster=self._cluster,
            gateway=self._gateway,
            api=self._api,
            reviews=TokenReviewer(self._reviewer),
            key=options.key,
            url=options.url or own,
            settings=options.workers,
            namespaces=tuple(options.namespaces),
            marks=options.marks,
        )
        jobs = self._jobs = JobController(shared)
        sources = MetricSources(
            reconcilers=jobs.running,
            gateway=self._gateway,
            calls=self._calls,
            counts=shared.counts,
        )
        self._series.register(MetricsPageCollector(sources.fill))
        ProcessCollector(registry=self._series)
        handlers = watch_handlers(jobs, shared)

        @kopf.on.login(id="login", registry=handlers)
        async def login(**_: object) -> kopf.ConnectionInfo:
            try:
                return await kopf_login(self._access)
            except RemoteError as error:  # such as a token file that is briefly missing
                raise kopf.TemporaryError(str(error), delay=LOGIN_SECONDS) from None

        logger.info("listening on %s:%d; workers connect to %s", options.listen[0], bound, shared.url)
        return handlers

    async def _work(self, handlers: kopf.OperatorRegistry) -> None:
        """Run kopf until `stop` is set, a signal comes, or kopf fails; raise its error unless the CRD is gone. When it
        ends, kopf cancels all tasks that were started after it.
        """
        assert self._jobs is not None
        self._works = not self._stop.is_set()
        if self._works and self._active and self._lease:
            self._begin(self._active.take(self._lease.predecessors))
        try:
            await kopf.operator(
                registry=handlers,
                settings=kopf_settings(self._jobs),
                indexers=self._cluster.indexers,
                standalone=True,
                clusterwide=not self._options.namespaces,
                namespaces=self._options.namespaces,
                stop_flag=self._stop,
            )
        except Exception as error:
            if getattr(error, "status", None) != NOT_FOUND:
                raise
            logger.warning("there is no CRD of BambooJobs any more: this operator ends, to be restarted")

    # the end

    async def _stop_jobs(self) -> None:
        """Stop all jobs' coordinators, disconnect the workers, and remove the pod's active label. May be called
        again.
        """
        self._works = False
        async with self._closing:
            if self._jobs:
                await self._jobs.stop()
            await self._gateway.stop()
            if self._active:
                await self._active.give_up()

    async def _close(self) -> None:
        await self._stop_jobs()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease:
            try:
                async with asyncio.timeout(RELEASE_SECONDS):
                    await self._lease.release()
            except (RemoteError, TimeoutError) as error:
                logger.warning("cannot release the lease: %s", said_by(error))
        await self._web.stop()
        for connection in self._connections:
            await connection.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]


def _authority() -> bytes | None:
    """Return the certificate of the cluster's authority; None if it cannot be read, for example outside a cluster."""
    try:
        return AUTHORITY_FILE.read_bytes()
    except OSError:
        return None


async def done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` and return True, or cancel it and return False as soon as `stop` is set. Raises the error of
    `work`.
    """
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
