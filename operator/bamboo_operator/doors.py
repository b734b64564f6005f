"""Where workers knock: one port for all jobs, one path for each; and the proof of who is there."""

import asyncio
import base64
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from bamboo.control.listener import BoundedListener, ConnectionBounds
from bamboo.control.server import Authenticate, Channels, Unauthorized, Unavailable
from bamboo.job.spec import DNS_LABEL, DNS_NAME
from bamboo.names import TOKEN_AUDIENCE
from bamboo.planning.plan import WorkerId
from bamboo_operator.api import API_ERRORS

POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"
BOUNDS = ConnectionBounds(unauthenticated=1024)
REVIEWS_AT_ONCE = 16
REVIEWS_WAITING = 512  # more than that are told to come again
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
    """Whom the status of a TokenReview names that vouches for a token.

    Raises Unauthorized unless it is a pod with a token for Bamboo.
    """
    if TOKEN_AUDIENCE not in (review.get("audiences") or []):
        raise Unauthorized(f"the token is not for {TOKEN_AUDIENCE}", "WrongAudience")
    user = review.get("user") or {}
    parts = str(user.get("username", "")).split(":")
    extra = user.get("extra") or {}
    names, uids = extra.get(POD_NAME) or [], extra.get(POD_UID) or []
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or len(names) != 1 or len(uids) != 1:
        raise Unauthorized("the token is not bound to a pod", "NoPod")
    return Bearer(namespace=parts[2], pod=names[0], uid=uids[0])


def claimed(token: str) -> Bearer:
    """Whom a ServiceAccount's token says it is for: nothing of it is verified.

    Raises Unauthorized if it says nothing of the kind, so that no stranger's word gets as far as the API server.
    """
    parts = token.split(".")
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        claims = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=_Claims)
    except (IndexError, ValueError, msgspec.DecodeError, RecursionError):
        raise Unauthorized("the token is not that of a pod", "NoPod") from None
    who = Bearer(namespace=claims.about.namespace, pod=claims.about.pod.name, uid=claims.about.pod.uid)
    if not (DNS_LABEL.fits(who.namespace) and DNS_NAME.fits(who.pod) and DNS_NAME.fits(who.uid)):
        raise Unauthorized("the token is not that of a pod", "NoPod")
    return who


class _Pod(msgspec.Struct):
    name: str
    uid: str


class _About(msgspec.Struct):
    namespace: str
    pod: _Pod


class _Claims(msgspec.Struct):
    about: _About = msgspec.field(name="kubernetes.io")


class Reviews:
    """TokenReviews, a few at a time; whoever does not get its turn soon may come again. Raises Unavailable."""

    def __init__(self, api: TokenReviews) -> None:
        self._api, self._turns, self._waiting = api, asyncio.Semaphore(REVIEWS_AT_ONCE), 0

    async def of(self, token: str) -> dict[str, Any]:
        """The status of the token's review."""
        if self._waiting >= REVIEWS_WAITING:
            raise Unavailable("too many callers")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._api.review_token(token, TOKEN_AUDIENCE)
        except API_ERRORS as error:
            raise Unavailable(str(error) or type(error).__name__) from error
        finally:
            self._waiting -= 1


def pod_check(
    job: JobKey,
    reviews: Reviews,
    uid_of: Callable[[WorkerId], str | None],
    is_of_another: Callable[[str], bool] = lambda pod_uid: False,
) -> Authenticate:
    """Accepts a worker of that job that brings its own pod's token.

    uid_of: a worker -> the uid of its pod if that lives, "" if it does not, None if no such pod has been seen (yet).
    is_of_another: does the pod of that uid belong to another job of that name?
    """

    async def authenticate(request: web.Request) -> WorkerId:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            raise Unauthorized("there is no token", "NoToken")
        claim = claimed(token)
        if claim.namespace != job[0]:
            raise Unauthorized(f"the token is that of pod {claim.namespace}/{claim.pod}", "OtherPod")
        uid = uid_of(claim.pod)
        if uid is None and is_of_another(claim.uid):
            raise Unauthorized(f"{claim.pod} is a pod of a job that had this name before", "NotLiving")
        if uid is None:  # NB: a watch may be late; who is refused ends
            raise Unavailable(f"no pod {claim.pod} of this job has been seen yet")
        if uid != claim.uid:
            raise Unauthorized(f"{claim.pod} is not a running pod of this job", "NotLiving")
        review = await reviews.of(token)
        if not review.get("authenticated"):  # NB: so it says also if it fails itself; who is refused ends
            raise Unavailable(f"the API server did not confirm the token of {claim.pod}: {review.get('error')}")
        if bearer(review) != claim:
            raise Unauthorized("the token does not belong to the pod that it names", "InvalidToken")
        return claim.pod

    return authenticate


class Doors:
    """One web server; jobs open and close their door."""

    def __init__(self) -> None:
        self._open: dict[JobKey, Channels] = {}
        self.refusals: Counter[str] = Counter()  # by reason
        self._runner: web.AppRunner | None = None
        self._listener: BoundedListener | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, bounds: ConnectionBounds = BOUNDS
    ) -> int:
        """Listens; returns the port."""
        app = web.Application()
        app.router.add_get("/v1/jobs/{namespace}/{name}/workers", self._enter)
        self._listener = BoundedListener(app, bounds, self._closed)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        return await self._listener.start(self._runner, host, port, tls)

    def _closed(self, reason: str) -> None:
        self.refusals[reason] += 1

    async def stop(self) -> None:
        for job, channels in list(self._open.items()):
            await self.close(job, channels)
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def connected(self) -> int:
        """Workers that are."""
        return sum(len(channels.connected) for channels in tuple(self._open.values()))

    def counted(self, authenticate: Authenticate) -> Authenticate:
        """The same, and whoever is sent away is counted."""

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

    def open(self, job: JobKey, channels: Channels) -> None:
        self._open[job] = channels

    def offer(self, job: JobKey, channels: Channels) -> None:
        """Opened only if nobody else has opened that door."""
        self._open.setdefault(job, channels)

    async def close(self, job: JobKey, channels: Channels) -> None:
        """NB: by now another job of that name may have opened its door."""
        if self._open.get(job) is channels:
            del self._open[job]
        await channels.close()

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        channels = self._open.get((request.match_info["namespace"], request.match_info["name"]))
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
