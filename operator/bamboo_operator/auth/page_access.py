"""Who may see a job's page: whoever may get the BambooJob.

The token that comes with a request is a ServiceAccount's or a user's for the audience `bamboo.dev/page`. A TokenReview
says whose it is and a SubjectAccessReview what that user may; both answers are cached for a while.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from bamboo_core.names import GROUP, PAGE_AUDIENCE, PLURAL
from bamboo_core.serving.rate_limit import TokenBucket
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.objects import JobKey

logger = logging.getLogger(__name__)

ALLOWED_SECONDS = 30.0  # so long after a right was taken away a page may still be seen
REFUSED_SECONDS = 5.0
REMEMBERED = 2048
AT_ONCE = 8  # reviews
WAITING = 64  # callers waiting for one
UNKNOWN_TOKENS_A_SECOND = 10.0  # tokens that have not been found valid yet are reviewed so often
UNKNOWN_TOKENS_AT_ONCE = 40.0


class ReviewApi(Protocol):
    async def review_token(self, token: str, audience: str) -> dict[str, Any]: ...

    async def review_access(self, user: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class PageRefusal:
    """Why somebody may not see a page."""

    status: int  # of the answer
    sentence: str
    retry: int | None = None  # seconds after which it makes sense to ask again


@dataclass(frozen=True, slots=True)
class _Answer:
    until: float
    refusal: PageRefusal | None


class PageAccess:
    """Admits those who may get a job. What callers without a right can cause is bounded: waiting, rate and memory."""

    def __init__(self, reviews: ReviewApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviews, self._clock = reviews, clock
        self._answers: OrderedDict[tuple[bytes, JobKey], _Answer] = OrderedDict()
        self._reviewing = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._unknown_tokens = TokenBucket(UNKNOWN_TOKENS_A_SECOND, UNKNOWN_TOKENS_AT_ONCE, clock())

    async def admit(self, token: str | None, job: JobKey) -> PageRefusal | None:
        """None: the caller may see the page."""
        if token is None:
            return PageRefusal(
                401, f"There is no token: make one with kubectl create token --audience {PAGE_AUDIENCE}."
            )
        key = (sha256(token.encode()).digest(), job)
        known = self._answers.get(key)
        if known is not None and known.until >= self._clock():
            return known.refusal
        trusted = known is not None and known.refusal is None
        if not trusted and not self._unknown_tokens.take(self._clock()):
            return PageRefusal(429, "Too many unknown tokens; try again later.", retry=1)
        if self._waiting >= WAITING:
            return PageRefusal(503, "Too many requests at the same time; try again later.", retry=2)
        return await self._ask(key, token)

    async def _ask(self, key: tuple[bytes, JobKey], token: str) -> PageRefusal | None:
        self._waiting += 1
        try:
            async with self._reviewing:
                found = await self._review(token, key[1])
        except API_ERRORS as error:
            logger.warning("cannot check who may see %s/%s: %s", *key[1], described(error))
            return PageRefusal(503, "The API server cannot check your token at the moment.", retry=2)
        finally:
            self._waiting -= 1
        self._answers[key] = _Answer(self._clock() + (REFUSED_SECONDS if found else ALLOWED_SECONDS), found)
        self._answers.move_to_end(key)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return found

    async def _review(self, token: str, job: JobKey) -> PageRefusal | None:
        review = await self._reviews.review_token(token, PAGE_AUDIENCE)
        if not review.get("authenticated") or PAGE_AUDIENCE not in (review.get("audiences") or ()):
            return PageRefusal(401, f"The token is not valid, or not for the audience {PAGE_AUDIENCE}.")
        namespace, name = job
        attributes = {"namespace": namespace, "name": name, "verb": "get", "group": GROUP, "resource": PLURAL}
        user = review.get("user") or {}
        access = await self._reviews.review_access(user, attributes)
        if access.get("allowed") and not access.get("denied"):
            return None
        return PageRefusal(
            403, f'"{user.get("username")}" may not get {PLURAL}.{GROUP} "{name}" in namespace {namespace}.'
        )
