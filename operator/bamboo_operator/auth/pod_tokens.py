"""Authentication of workers by their pods' ServiceAccount tokens, which the API server verifies (TokenReview)."""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from bamboo_core.control.server import Authenticate, Unauthorized, Unavailable
from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import TOKEN_AUDIENCE
from bamboo_core.page.server import bearer
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.attempts import described
from bamboo_operator.kube.objects import JobKey

POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"
REVIEWS_AT_ONCE = 16
REVIEWS_WAITING = 512  # callers; more are asked to retry


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The pod that a token names; the token may be unverified."""

    namespace: str
    pod: str
    uid: str


def reviewed_identity(review: dict[str, Any]) -> PodIdentity:
    """Return the pod that a reviewed token is bound to. review: the status of the TokenReview.

    Raises Unauthorized if the token is bound to no pod or is not for TOKEN_AUDIENCE.
    """
    if TOKEN_AUDIENCE not in (review.get("audiences") or []):
        raise Unauthorized(f"the token is not for {TOKEN_AUDIENCE}", "WrongAudience")
    user = review.get("user") or {}
    parts = str(user.get("username", "")).split(":")
    extra = user.get("extra") or {}
    names, uids = extra.get(POD_NAME) or [], extra.get(POD_UID) or []
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or len(names) != 1 or len(uids) != 1:
        raise Unauthorized("the token is not bound to a pod", "NoPod")
    return PodIdentity(namespace=parts[2], pod=names[0], uid=uids[0])


def bearer_token(request: web.Request) -> str:
    """Return the caller's bearer token. Raises Unauthorized if it is missing, too long or not ASCII."""
    if (token := bearer(request.headers)) is None:
        raise Unauthorized("there is no token", "NoToken")
    return token


def claimed_identity(token: str) -> PodIdentity:
    """Return the pod that a ServiceAccount token (a JWT) names; its signature is not verified.

    Raises Unauthorized if the token names no pod, so that the API server need not review arbitrary texts.
    """
    parts = token.split(".")
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        claims = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=_Claims)
    except (IndexError, ValueError, msgspec.DecodeError, RecursionError):
        raise Unauthorized("the token is not that of a pod", "NoPod") from None
    who = PodIdentity(namespace=claims.about.namespace, pod=claims.about.pod.name, uid=claims.about.pod.uid)
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


class TokenReviewer:
    """A client for the API server's TokenReviews, with at most REVIEWS_AT_ONCE requests at a time."""

    def __init__(self, api: KubeApi) -> None:
        self._api, self._turns, self._waiting = api, asyncio.Semaphore(REVIEWS_AT_ONCE), 0

    async def of(self, token: str) -> dict[str, Any]:
        """Return the status of the token's TokenReview. Raises Unavailable, after which the caller should retry, if too
        many callers wait or the API server fails.
        """
        if self._waiting >= REVIEWS_WAITING:
            raise Unavailable("too many callers")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._api.review_token(token, (TOKEN_AUDIENCE,))
        except RemoteError as error:
            raise Unavailable(described(error)) from error
        finally:
            self._waiting -= 1


def pod_authenticator(
    job: JobKey,
    reviews: TokenReviewer,
    uid_of: Callable[[WorkerId], str | None],
    is_of_another_job: Callable[[str], bool] = lambda pod_uid: False,
) -> Authenticate:
    """Return a check that accepts a worker of this job by its own pod's token. The check raises Unauthorized, after
    which the worker ends, or Unavailable, after which the worker tries again.

    uid_of: returns the UID of a worker's pod; "" if the worker is lost, None if its pod was not seen yet.
    is_of_another_job: takes a pod's UID; returns whether it belongs to another job of the same name, or to none.
    """

    async def authenticate(request: web.Request) -> WorkerId:
        token = bearer_token(request)
        claim = claimed_identity(token)
        if claim.namespace != job[0]:
            raise Unauthorized(f"the token is that of pod {claim.namespace}/{claim.pod}", "OtherPod")
        uid = uid_of(claim.pod)
        if uid is None and is_of_another_job(claim.uid):
            raise Unauthorized(f"{claim.pod} is a pod of a job that had this name before", "NotLiving")
        if uid is None:  # the watch may be late, and a refused worker ends
            raise Unavailable(f"no pod {claim.pod} of this job has been seen yet")
        if uid != claim.uid:
            raise Unauthorized(f"{claim.pod} is not a running pod of this job", "NotLiving")
        review = await reviews.of(token)
        if not review.get("authenticated"):  # also if the review itself fails; a refused worker ends
            raise Unavailable(f"the API server did not confirm the token of {claim.pod}: {review.get('error')}")
        if reviewed_identity(review) != claim:
            raise Unauthorized("the token does not belong to the pod that it names", "InvalidToken")
        return claim.pod

    return authenticate
