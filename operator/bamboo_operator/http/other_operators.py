"""What this operator says of jobs that another one looks after: their lines in the list are as their status says, and
who asks for such a job's page gets the other's answer, with the headers that say who asks.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable

import aiohttp
from aiohttp import web

from bamboo_core.complaints import said_by
from bamboo_core.page import document as d
from bamboo_core.page.job_rows import job_row
from bamboo_core.page.server import HEADERS, refusal
from bamboo_core.view.job_view import JobView
from bamboo_operator.kube.lease import HolderTerms

logger = logging.getLogger(__name__)

SECONDS = 10.0  # for the other's answer
CONNECTIONS = 16
LED_ON = "Bamboo-Led-On"  # a header of what another operator asks for somebody: it goes no further
OF_THE_CONNECTION = {  # headers that are not the caller's
    "host",
    "connection",
    "keep-alive",
    "upgrade",
    "te",
    "transfer-encoding",
    "content-length",
    "accept-encoding",
}
PASSED_BACK = ("Retry-After", "WWW-Authenticate")


class OtherOperators:
    """holder: where the operator is that looks after a namespace's jobs; None if it is this one, without addresses if
    it is not known. jobs: those of the others.
    """

    def __init__(
        self, holder: Callable[[str], Awaitable[HolderTerms | None]], jobs: Callable[[], Iterable[JobView]]
    ) -> None:
        self._holder, self._jobs = holder, jobs
        self._session: aiohttp.ClientSession | None = None

    def rows(self) -> Iterable[d.JobRow]:
        """The lines of the others' jobs."""
        return (job_row(view, _cost(view)) for view in self._jobs())

    async def answer(self, request: web.Request, namespace: str) -> web.Response | None:
        """The other's answer; None if jobs of that namespace are this operator's."""
        holder = await self._holder(namespace)
        if holder is None:
            return None
        if not holder.web or LED_ON in request.headers:
            sentence = f"No operator looks after jobs of namespace {namespace} yet; one is about to."
            return refusal(503, sentence, Retry_After="5")
        try:
            return await self._ask(holder.web, request)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("no answer of the operator at %s: %s", holder.web, said_by(error))
            return refusal(503, "The operator that looks after the job does not answer.", Retry_After="5")

    async def _ask(self, where: str, request: web.Request) -> web.Response:
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=SECONDS)
            self._session = aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=CONNECTIONS))
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in OF_THE_CONNECTION]
        url = f"http://{where}{request.rel_url.raw_path}"
        async with self._session.get(url, headers=[*headers, (LED_ON, "1")], allow_redirects=False) as answer:
            passed = {name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}
            body, kind = await answer.read(), answer.content_type
        return web.Response(status=answer.status, body=body, content_type=kind, headers={**HEADERS, **passed})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _cost(view: JobView) -> d.PageCost | None:
    written = view.status.cost
    if written.total is None and written.per_hour is None:
        return None
    total, per_hour = (None if value is None else float(value) for value in (written.total, written.per_hour))
    return d.PageCost(total=total, per_hour=per_hour)
