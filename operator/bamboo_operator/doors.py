"""Where workers knock: one port for all jobs, one path for each; and the proof of who is there."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from bamboo.names import TOKEN_AUDIENCE
from bamboo.plan import WorkerId
from bamboo.server import Authenticate, Channels, Unauthorized, Unavailable
from bamboo_operator.api import API_ERRORS

logger = logging.getLogger(__name__)

POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"
JobKey = tuple[str, str]  # namespace and name


def path(job: JobKey) -> str:
    namespace, name = job
    return f"/v1/jobs/{namespace}/{name}/workers"


class TokenReviews(Protocol):
    async def review_token(self, token: str, audience: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Bearer:
    """Whom a token was made for: a pod, by name and uid, in a namespace."""

    namespace: str
    pod: str
    uid: str


def bearer(review: dict[str, Any]) -> Bearer:
    """Whom the status of a TokenReview names. Raises Unauthorized unless it is a pod with a token for Bamboo."""
    if not review.get("authenticated"):
        raise Unauthorized("the token is not valid")
    if TOKEN_AUDIENCE not in (review.get("audiences") or []):
        raise Unauthorized(f"the token is not for {TOKEN_AUDIENCE}")
    user = review.get("user") or {}
    parts = str(user.get("username", "")).split(":")
    extra = user.get("extra") or {}
    names, uids = extra.get(POD_NAME) or [], extra.get(POD_UID) or []
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or len(names) != 1 or len(uids) != 1:
        raise Unauthorized("the token is not bound to a pod")
    return Bearer(namespace=parts[2], pod=names[0], uid=uids[0])


def pod_check(job: JobKey, reviews: TokenReviews, uid_of: Callable[[WorkerId], str | None]) -> Authenticate:
    """Accepts a worker of that job that brings its own pod's token.

    uid_of: a worker -> the uid of its pod if that lives, "" if it does not, None if no such pod has been seen (yet).
    """

    async def authenticate(request: web.Request, worker: WorkerId) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            raise Unauthorized("there is no token")
        try:
            who = bearer(await reviews.review_token(token, TOKEN_AUDIENCE))
        except API_ERRORS as error:
            raise Unavailable(str(error) or type(error).__name__) from error
        if who.namespace != job[0] or who.pod != worker:
            raise Unauthorized(f"the token is that of pod {who.namespace}/{who.pod}")
        uid = uid_of(worker)
        if uid is None:  # NB: a watch may be late; who is refused ends
            raise Unavailable(f"no pod {worker} of this job has been seen yet")
        if uid != who.uid:
            raise Unauthorized(f"{worker} is no living pod of this job")

    return authenticate


class Doors:
    """One web server; jobs open and close their door. healthy: why the operator is not, or None."""

    def __init__(self, healthy: Callable[[], str | None]) -> None:
        self._open: dict[JobKey, Channels] = {}
        self._healthy = healthy
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port."""
        app = web.Application()
        app.router.add_get("/v1/jobs/{namespace}/{name}/workers", self._enter)
        app.router.add_get("/healthz", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        for job in list(self._open):
            await self.close(job)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self, job: JobKey, channels: Channels) -> None:
        self._open[job] = channels

    async def close(self, job: JobKey) -> None:
        if (channels := self._open.pop(job, None)) is not None:
            await channels.close()

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        channels = self._open.get((request.match_info["namespace"], request.match_info["name"]))
        if channels is None:
            raise web.HTTPNotFound(text="no such job here\n")
        return await channels.handle(request)

    async def _health(self, _: web.Request) -> web.Response:
        problem = self._healthy()
        if problem:
            logger.error("not healthy: %s", problem)  # NB: this port is everybody's
        return web.Response(text="stuck\n" if problem else "ok\n", status=503 if problem else 200)
