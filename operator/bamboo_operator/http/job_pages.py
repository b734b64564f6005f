"""Job pages on the operator's web port, for users who may get the BambooJob.

Each request for a job's data carries a token: a TokenReview identifies its user, and a SubjectAccessReview decides
whether that user may get the job. Nothing is cached, so a user who loses that right loses access at once.
"""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import RemoteError
from bamboo_core.names import GROUP, PAGE_AUDIENCE, PLURAL
from bamboo_core.page.document import Document, PoolCost, document
from bamboo_core.page.server import add_page, answer, bearer, refusal
from bamboo_core.page.timeline import steady_clock
from bamboo_operator.kube.attempts import described
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.status.facts import OperatedJob


def page_document(known: OperatedJob, now: float) -> Document:
    """Return the data of a job's page. The pools of an ended or suspended job show no paid workers."""
    facts = known.facts
    idle = facts.suspended or known.view.status.ended is not None
    paid = {} if idle else facts.paid if facts.paid is not None else facts.pods
    pools = (
        PoolCost(
            name=pool.name,
            capacity=pool.capacity.value,
            workers=paid.get(pool.name, 0),
            price=None if pool.price_per_hour is None else f"{pool.price_per_hour:f}",
        )
        for pool in facts.pools
    )
    return document(known.view, known.record, place="cluster", now=now, pools=tuple(pools))


logger = logging.getLogger(__name__)

REVIEWS_AT_ONCE = 8
MOST_CALLERS = 64  # waiting for reviews; more are asked to retry


class JobPages:
    """The web pages of all jobs. known: returns the facts of a job, or None for an unknown job. reviews: makes token
    and access reviews.
    """

    def __init__(self, known: Callable[[JobKey], OperatedJob | None], reviews: KubeApi) -> None:
        self._known, self._reviews = known, reviews
        self._reviewing, self._callers = asyncio.Semaphore(REVIEWS_AT_ONCE), 0
        self._now = steady_clock()

    def add_to(self, app: web.Application) -> None:
        """Add the routes of the jobs' pages, /jobs/NAMESPACE/NAME/, to an application."""
        app.router.add_get("/jobs/{namespace}/{name}", self._to_slash)
        add_page(app, "/jobs/{namespace}/{name}/", self._state)

    @staticmethod
    async def _to_slash(request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect(f"{_job(request)[1]}/")

    async def _state(self, request: web.Request) -> web.Response:
        job = _job(request)
        token = bearer(request.headers)
        if token is None:
            sentence = f"There is no token: make one with kubectl create token --audience {PAGE_AUDIENCE}."
            return refusal(401, sentence, WWW_Authenticate="Bearer")
        if self._callers >= MOST_CALLERS:
            return refusal(503, "Too many requests at the same time; try again later.", Retry_After="2")
        self._callers += 1
        try:
            async with self._reviewing:
                refused = await self._refused(token, job)
        except RemoteError as error:
            logger.warning("cannot check who may see pages: %s", described(error))
            return refusal(503, "The API server cannot check who you are at the moment.", Retry_After="2")
        finally:
            self._callers -= 1
        if refused is not None:
            return refused
        known = self._known(job)
        if known is None:
            return refusal(404, f"There is no BambooJob {job[1]} in namespace {job[0]} that this operator runs.")
        return answer(page_document(known, self._now()))

    async def _refused(self, token: str, job: JobKey) -> web.Response | None:
        """Return a 401 response for a bad token, 403 if its user may not get the job, else None. Raises RemoteError."""
        review = await self._reviews.review_token(token, (PAGE_AUDIENCE,))
        if not review.get("authenticated") or PAGE_AUDIENCE not in (review.get("audiences") or ()):
            sentence = f"The token is not valid, or not for the audience {PAGE_AUDIENCE}."
            return refusal(401, sentence, WWW_Authenticate="Bearer")
        user, (namespace, name) = review.get("user") or {}, job
        wanted = {"namespace": namespace, "name": name, "verb": "get", "group": GROUP, "resource": PLURAL}
        access = await self._reviews.review_access(user, wanted)
        if access.get("allowed") and not access.get("denied"):
            return None
        sentence = f'"{user.get("username")}" may not get {PLURAL}.{GROUP} "{name}" in namespace {namespace}.'
        return refusal(403, sentence)


def _job(request: web.Request) -> JobKey:
    """Return the job in the path. Raises HTTPNotFound for an invalid name, which must reach neither a redirect nor the
    API server.
    """
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    if not DNS_LABEL.fits(namespace) or not DNS_NAME.fits(name):
        raise web.HTTPNotFound(text="expected /jobs/NAMESPACE/NAME/\n")
    return namespace, name
