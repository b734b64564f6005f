"""Who may see which page: whoever may get the BambooJob, and in the list those who may list them.

Whose a token is, a TokenReview says; what that user may, SubjectAccessReviews say. All answers are cached for a while.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from bamboo_core.names import GROUP, PAGE_AUDIENCE, PLURAL
from bamboo_core.serving.rate_limit import TokenBucket
from bamboo_operator.auth.page_callers import PageCaller, PageRefusal, ProxyCaller, TokenCaller
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.objects import JobKey

logger = logging.getLogger(__name__)

ALLOWED_SECONDS = 30.0  # so long after a right was taken away a page may still be seen
REFUSED_SECONDS = 5.0
REMEMBERED = 2048
AT_ONCE = 8  # reviews
WAITING = 64  # callers waiting for one
UNKNOWN_TOKENS_A_SECOND = 10.0  # questions that have not been granted yet are reviewed so often
UNKNOWN_TOKENS_AT_ONCE = 40.0
MOST_NAMESPACES = 500  # in which a caller's right to list is reviewed
T = TypeVar("T")
K = TypeVar("K")


class ReviewApi(Protocol):
    async def review_token(self, token: str, audiences: Sequence[str]) -> dict[str, Any]: ...

    async def review_access(self, user: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class SeenNamespaces:
    """The namespaces whose jobs a caller may list."""

    user: str
    everywhere: bool
    seen: frozenset[str] = frozenset()  # of those that were reviewed, if not everywhere
    reviewed: frozenset[str] = frozenset()
    until: float = 0.0  # when it has to be reviewed anew

    def __contains__(self, namespace: str) -> bool:
        return self.everywhere or namespace in self.seen


@dataclass(frozen=True, slots=True)
class _User:
    """Somebody who has proved who she is. info: as a TokenReview names her."""

    key: bytes
    info: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.info.get("username"))


class _Remembered(Generic[K, T]):
    """The newest answers, each with the time until which it holds."""

    def __init__(self) -> None:
        self._answers: OrderedDict[K, tuple[float, T]] = OrderedDict()

    def last(self, key: K) -> T | None:
        """The newest answer, however old."""
        known = self._answers.get(key)
        return known[1] if known else None

    def fresh(self, key: K, now: float) -> T | None:
        known = self._answers.get(key)
        return known[1] if known and known[0] >= now else None

    def keep(self, key: K, until: float, answer: T) -> None:
        self._answers[key] = (until, answer)
        self._answers.move_to_end(key)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)


class PageAccess:
    """Admits those who may get a job. What callers without a right can cause is bounded: waiting, rate and memory."""

    def __init__(
        self,
        reviews: ReviewApi,
        audiences: Sequence[str] = (PAGE_AUDIENCE,),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reviews, self._audiences, self._clock = reviews, tuple(audiences), clock
        self._users: _Remembered[bytes, _User | PageRefusal] = _Remembered()
        self._rights: _Remembered[tuple[bytes, JobKey], bool] = _Remembered()
        self._lists: _Remembered[bytes, SeenNamespaces] = _Remembered()
        self._reviewing = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._unknown_tokens = TokenBucket(UNKNOWN_TOKENS_A_SECOND, UNKNOWN_TOKENS_AT_ONCE, clock())

    async def admit(self, caller: PageCaller | None, job: JobKey) -> PageRefusal | None:
        """None: the caller may see the page."""
        user = await self._identify(caller)
        if isinstance(user, PageRefusal):
            return user
        key, (namespace, name) = (user.key, job), job
        allowed = self._rights.fresh(key, self._clock())
        if allowed is None:
            trusted = isinstance(caller, ProxyCaller) or self._rights.last(key) is True
            attributes = {"namespace": namespace, "name": name, "verb": "get"}
            found = await self._bounded(lambda: self._may(user, attributes), trusted=trusted)
            if isinstance(found, PageRefusal):
                return found
            allowed = found
            self._rights.keep(key, self._clock() + (ALLOWED_SECONDS if allowed else REFUSED_SECONDS), allowed)
        if allowed:
            return None
        return PageRefusal(403, f'"{user.name}" may not get {PLURAL}.{GROUP} "{name}" in namespace {namespace}.')

    async def listed(self, caller: PageCaller | None, namespaces: Collection[str]) -> SeenNamespaces | PageRefusal:
        """Those of the namespaces whose jobs the caller may list; of more than 500 the first by name are reviewed."""
        user = await self._identify(caller)
        if isinstance(user, PageRefusal):
            return user
        known = self._lists.fresh(user.key, self._clock())
        if known is not None and known.everywhere:
            return known
        reviewed = known.reviewed if known else frozenset()
        missing = sorted(set(namespaces) - reviewed)[: MOST_NAMESPACES - len(reviewed)]
        if known is not None and not missing:
            return known
        before = self._lists.last(user.key)
        granted = before is not None and (before.everywhere or bool(before.seen))
        trusted = isinstance(caller, ProxyCaller) or granted
        found = await self._bounded(lambda: self._list(user, known, missing), trusted=trusted)
        if isinstance(found, SeenNamespaces):
            self._lists.keep(user.key, found.until, found)
        return found

    async def _list(self, user: _User, known: SeenNamespaces | None, missing: Sequence[str]) -> SeenNamespaces:
        """known: what has been reviewed, and goes on to hold for as long as it did."""
        if known is None:
            until = self._clock() + ALLOWED_SECONDS
            everywhere = await self._may(user, {"verb": "list"})
            known = SeenNamespaces(user.name, everywhere, until=until)
            if everywhere:
                return known
        asked = (self._may(user, {"verb": "list", "namespace": namespace}) for namespace in missing)
        found = await asyncio.gather(*asked)
        seen = known.seen | {name for name, may in zip(missing, found, strict=True) if may}
        return SeenNamespaces(user.name, False, seen, known.reviewed | set(missing), known.until)

    async def _identify(self, caller: PageCaller | None) -> _User | PageRefusal:
        match caller:
            case None:
                return PageRefusal(
                    401, f"There is no token: make one with kubectl create token --audience {PAGE_AUDIENCE}."
                )
            case ProxyCaller(user, groups):
                return _User(caller.key, {"username": user, "groups": list(groups)})
            case TokenCaller(token):
                return await self._holder(caller.key, token)

    async def _holder(self, key: bytes, token: str) -> _User | PageRefusal:
        """Whose the token is."""
        known = self._users.fresh(key, self._clock())
        if known is not None:
            return known
        trusted = isinstance(self._users.last(key), _User)
        review = await self._bounded(lambda: self._review(token), trusted=trusted)
        if isinstance(review, PageRefusal):
            return review
        valid = review.get("authenticated") and not set(self._audiences).isdisjoint(review.get("audiences") or ())
        found: _User | PageRefusal = _User(key, review.get("user") or {})
        if not valid:
            found = PageRefusal(401, f"The token is not valid, or not for the audience {' or '.join(self._audiences)}.")
        self._users.keep(key, self._clock() + (ALLOWED_SECONDS if valid else REFUSED_SECONDS), found)
        return found

    async def _bounded(self, review: Callable[[], Awaitable[T]], *, trusted: bool) -> T | PageRefusal:
        """What the review found. trusted: the proxy has signed the caller in, or the same was granted before."""
        if not trusted and not self._unknown_tokens.take(self._clock()):
            return PageRefusal(429, "Too many unknown tokens; try again later.", retry=1)
        if self._waiting >= WAITING:
            return PageRefusal(503, "Too many requests at the same time; try again later.", retry=2)
        self._waiting += 1
        try:
            return await review()
        except API_ERRORS as error:
            logger.warning("cannot check who may see pages: %s", described(error))
            return PageRefusal(503, "The API server cannot check who you are at the moment.", retry=2)
        finally:
            self._waiting -= 1

    async def _review(self, token: str) -> dict[str, Any]:
        async with self._reviewing:
            return await self._reviews.review_token(token, self._audiences)

    async def _may(self, user: _User, attributes: dict[str, str]) -> bool:
        async with self._reviewing:
            access = await self._reviews.review_access(user.info, {**attributes, "group": GROUP, "resource": PLURAL})
        return bool(access.get("allowed")) and not access.get("denied")
