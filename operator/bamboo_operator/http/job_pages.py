"""Job pages on the operator's web port: whoever may get a BambooJob may see its page."""

from collections.abc import Callable

from aiohttp import web

from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME
from bamboo_core.page.history import steady_clock
from bamboo_core.page.server import add_page, answer, bearer, refusal
from bamboo_operator.auth.page_access import PageAccess, ReviewApi
from bamboo_operator.http.page_document import page_document
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.status.operated_job import OperatedJob


class JobPages:
    """The pages of all jobs. known: what is known of a job; None for one that is not there."""

    def __init__(self, known: Callable[[JobKey], OperatedJob | None], reviews: ReviewApi) -> None:
        self._known = known
        self._access = PageAccess(reviews)
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
        refused = await self._access.admit(bearer(request), job)
        if refused is not None:
            headers = {"Retry_After": str(refused.retry)} if refused.retry is not None else {}
            if refused.status == 401:
                headers["WWW_Authenticate"] = "Bearer"
            return refusal(refused.status, refused.sentence, **headers)
        known = self._known(job)
        if known is None:
            return refusal(404, f"There is no BambooJob {job[1]} in namespace {job[0]} that this operator runs.")
        return answer(page_document(known, self._now()))


def _job(request: web.Request) -> JobKey:
    """What is no name must get no further: neither into a redirect nor to the API server."""
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    if not DNS_LABEL.fits(namespace) or not DNS_NAME.fits(name):
        raise web.HTTPNotFound(text="expected /jobs/NAMESPACE/NAME/\n")
    return namespace, name
