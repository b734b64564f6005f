"""Job pages on the operator's web port: who may look is who may get the BambooJob.

The token that comes with a request is a ServiceAccount's or a user's for the audience `bamboo.dev/page`. A TokenReview
says whose it is and a SubjectAccessReview what that user may; both answers are remembered for a while.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from aiohttp import web

from bamboo.control.rate_limit import TokenBucket
from bamboo.job.spec import DNS_LABEL, DNS_NAME
from bamboo.names import GROUP, PAGE_AUDIENCE, PLURAL
from bamboo.page.history import steady_clock
from bamboo.page.server import add_page, answer, bearer, refusal
from bamboo_operator.api import API_ERRORS
from bamboo_operator.doors import JobKey
from bamboo_operator.looks import Look, look_document

logger = logging.getLogger(__name__)

ALLOWED_SECONDS = 30.0  # so long after a right was taken away a page may still be seen
REFUSED_SECONDS = 5.0
REMEMBERED = 2048
AT_ONCE = 8  # reviews
WAITING = 64  # for one
STRANGERS_A_SECOND = 10.0  # tokens that have not been seen to be good are reviewed so often
STRANGERS_AT_ONCE = 40.0


class Reviews(Protocol):
    async def review_token(self, token: str, audience: str) -> dict[str, Any]: ...

    async def review_access(self, user: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """status: of the answer. retry: seconds after which it makes sense to ask again."""

    status: int
    sentence: str
    retry: int | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    until: float
    refusal: Refusal | None


class Gate:
    """Admits those who may get a job. The work that strangers can cause is bounded: waiting, rate and memory."""

    def __init__(self, reviews: Reviews, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviews, self._clock = reviews, clock
        self._verdicts: OrderedDict[tuple[bytes, JobKey], _Verdict] = OrderedDict()
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._strangers = TokenBucket(STRANGERS_A_SECOND, STRANGERS_AT_ONCE, clock())

    async def admit(self, token: str | None, job: JobKey) -> Refusal | None:
        """None: come in."""
        if token is None:
            return Refusal(401, f"There is no token: make one with kubectl create token --audience {PAGE_AUDIENCE}.")
        key = (sha256(token.encode()).digest(), job)
        known = self._verdicts.get(key)
        if known is not None and known.until >= self._clock():
            return known.refusal
        trusted = known is not None and known.refusal is None
        if not trusted and not self._strangers.take(self._clock()):
            return Refusal(429, "Too many unknown tokens; try again later.", retry=1)
        if self._waiting >= WAITING:
            return Refusal(503, "Too many requests at the same time; try again later.", retry=2)
        return await self._ask(key, token)

    async def _ask(self, key: tuple[bytes, JobKey], token: str) -> Refusal | None:
        self._waiting += 1
        try:
            async with self._turn:
                found = await self._review(token, key[1])
        except API_ERRORS as error:
            logger.warning("cannot check who may see %s/%s: %s", *key[1], error or type(error).__name__)
            return Refusal(503, "The API server cannot check your token at the moment.", retry=2)
        finally:
            self._waiting -= 1
        self._verdicts[key] = _Verdict(self._clock() + (REFUSED_SECONDS if found else ALLOWED_SECONDS), found)
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return found

    async def _review(self, token: str, job: JobKey) -> Refusal | None:
        review = await self._reviews.review_token(token, PAGE_AUDIENCE)
        if not review.get("authenticated") or PAGE_AUDIENCE not in (review.get("audiences") or ()):
            return Refusal(401, f"The token is not valid, or not for the audience {PAGE_AUDIENCE}.")
        namespace, name = job
        attributes = {"namespace": namespace, "name": name, "verb": "get", "group": GROUP, "resource": PLURAL}
        user = review.get("user") or {}
        access = await self._reviews.review_access(user, attributes)
        if access.get("allowed") and not access.get("denied"):
            return None
        return Refusal(403, f'"{user.get("username")}" may not get {PLURAL}.{GROUP} "{name}" in namespace {namespace}.')


class Pages:
    """look: what is known of a job; None for one that is not there."""

    def __init__(self, look: Callable[[JobKey], Look | None], reviews: Reviews) -> None:
        self._look = look
        self._gate = Gate(reviews)
        self._now = steady_clock()

    def add_to(self, app: web.Application) -> None:
        """The page of namespace/name is at /jobs/NAMESPACE/NAME/."""
        app.router.add_get("/jobs/{namespace}/{name}", self._to_slash)
        add_page(app, "/jobs/{namespace}/{name}/", self._state)

    @staticmethod
    async def _to_slash(request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect(f"{_job(request)[1]}/")

    async def _state(self, request: web.Request) -> web.Response:
        job = _job(request)
        refused = await self._gate.admit(bearer(request), job)
        if refused is not None:
            headers = {"Retry_After": str(refused.retry)} if refused.retry is not None else {}
            if refused.status == 401:
                headers["WWW_Authenticate"] = "Bearer"
            return refusal(refused.status, refused.sentence, **headers)
        look = self._look(job)
        if look is None:
            return refusal(404, f"There is no BambooJob {job[1]} in namespace {job[0]} that this operator runs.")
        return answer(look_document(look, self._now()))


def _job(request: web.Request) -> JobKey:
    """NB: what is no name must go no further: not into a redirect, not to the API server."""
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    if not DNS_LABEL.fits(namespace) or not DNS_NAME.fits(name):
        raise web.HTTPNotFound(text="expected /jobs/NAMESPACE/NAME/\n")
    return namespace, name
