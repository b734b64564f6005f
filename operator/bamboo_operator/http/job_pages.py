"""Job pages on the operator's web port, for who may get the BambooJob; and their list, for who may list them."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from aiohttp import web
from msgspec.structs import replace

from bamboo_core.complaints import said_by
from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME
from bamboo_core.page import document as d
from bamboo_core.page.history import steady_clock
from bamboo_core.page.job_rows import by_attention, job_row
from bamboo_core.page.server import LIST_FILES, add_page, answer, refusal
from bamboo_operator.auth.page_access import PageAccess, ReviewApi, SeenNamespaces
from bamboo_operator.auth.page_callers import (
    SECRET_HEADER,
    CallerRules,
    PageCaller,
    PageRefusal,
    caller_of,
    read_secret,
)
from bamboo_operator.http.page_document import cost, page_document
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.status.operated_job import OperatedJob

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0  # for which the lines of all jobs serve all who ask, at least
REST = 20.0  # times what it took to make them, until they are made again
JOBS_AT_A_TIME = 10  # whose lines are made before others may use the thread, such as for a takeover
JOB_DASHBOARD, FLEET_DASHBOARD = "bamboo-job", "bamboo-fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """What an installation says about its pages. url: under which people reach the web port, without a slash at its
    end; grafana: likewise Grafana, that has the dashboards. "" if there is none.
    """

    callers: CallerRules = field(default_factory=CallerRules)
    url: str = ""
    grafana: str = ""


class JobPages:
    """The pages of all jobs, and their list. known: what is known of a job; None for one that is not there. every: what
    is known of all.
    """

    def __init__(
        self,
        known: Callable[[JobKey], OperatedJob | None],
        every: Callable[[], Iterable[OperatedJob]],
        reviews: ReviewApi,
        settings: PageSettings | None = None,
    ) -> None:
        self._known, self._every = known, every
        self._settings = settings or PageSettings()
        self._access = PageAccess(reviews, self._settings.callers.audiences)
        self._now = steady_clock()
        self._rows: tuple[d.JobRow, ...] = ()
        self._rows_until = float("-inf")
        self._making_rows = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        """The page of namespace/name is at /jobs/NAMESPACE/NAME/, the list of all jobs at /jobs/."""
        app.router.add_get("/", self._to_list)
        app.router.add_get("/jobs", self._to_list)
        app.router.add_get("/jobs/{namespace}/{name}", self._to_slash)
        add_page(app, "/jobs/", self._list, LIST_FILES)
        add_page(app, "/jobs/{namespace}/{name}/", self._state)

    @staticmethod
    async def _to_list(_: web.Request) -> web.Response:
        raise web.HTTPFound("jobs/")

    @staticmethod
    async def _to_slash(request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect(f"{_job(request)[1]}/")

    async def _state(self, request: web.Request) -> web.Response:
        job = _job(request)
        caller = self._caller(request)
        refused = caller if isinstance(caller, PageRefusal) else await self._access.admit(caller, job)
        if refused is not None:
            return _refused(refused)
        known = self._known(job)
        if known is None:
            return refusal(404, f"There is no BambooJob {job[1]} in namespace {job[0]} that this operator runs.")
        return answer(replace(page_document(known, self._now()), grafana=self._job_dashboard(job)))

    async def _list(self, request: web.Request) -> web.Response:
        caller = self._caller(request)
        if isinstance(caller, PageRefusal):
            return _refused(caller)
        rows = await self._fresh_rows()
        seen = await self._access.listed(caller, {row.namespace for row in rows})
        if isinstance(seen, PageRefusal):
            return _refused(seen)
        return answer(
            d.JobList(
                now=self._now(),
                rows=tuple(row for row in rows if row.namespace in seen),
                unknown=_not_shown(rows, seen),
                grafana=self._dashboard(FLEET_DASHBOARD, {}),
            )
        )

    def _caller(self, request: web.Request) -> PageCaller | PageRefusal | None:
        """Who asks. The secret is read when somebody shows one, so that a new one counts as soon as it is there."""
        proxy, secret = self._settings.callers.proxy, None
        if proxy is not None and SECRET_HEADER in request.headers:
            try:
                secret = read_secret(proxy.secret)
            except (OSError, ValueError) as error:
                logger.error("cannot tell whether a request comes from the proxy: %s", said_by(error))
                return PageRefusal(503, "The operator cannot read the secret that it shares with the proxy.", retry=10)
        return caller_of(request.headers, proxy, secret)

    async def _fresh_rows(self) -> tuple[d.JobRow, ...]:
        """The lines of all jobs, made once for all who ask within a second or more: they cost a twentieth of a core at
        most, however many jobs there are.
        """
        async with self._making_rows:
            began = self._now()
            if began > self._rows_until:
                found: list[d.JobRow] = []
                for row in self._all_rows():
                    found.append(row)
                    if len(found) % JOBS_AT_A_TIME == 0:
                        await asyncio.sleep(0)
                self._rows, now = by_attention(found), self._now()
                self._rows_until = now + max(FRESH_SECONDS, REST * (now - began))
        return self._rows

    def _all_rows(self) -> Iterator[d.JobRow]:
        yield from (job_row(known.view, cost(known, None)) for known in self._every())

    def _job_dashboard(self, job: JobKey) -> str | None:
        namespace, name = job
        return self._dashboard(JOB_DASHBOARD, {"var-namespace": namespace, "var-job": name})

    def _dashboard(self, uid: str, variables: dict[str, str]) -> str | None:
        if not self._settings.grafana:
            return None
        return f"{self._settings.grafana}/d/{uid}{'?' if variables else ''}{urlencode(variables)}"


def _refused(refused: PageRefusal) -> web.Response:
    headers = {"Retry_After": str(refused.retry)} if refused.retry is not None else {}
    if refused.status == 401:
        headers["WWW_Authenticate"] = "Bearer"
    return refusal(refused.status, refused.sentence, **headers)


def _not_shown(rows: Sequence[d.JobRow], seen: SeenNamespaces) -> tuple[str, ...]:
    """Why jobs may be missing; nothing that tells whether there are others."""
    if seen.everywhere:
        return ()
    told = []
    if not seen.seen:
        told.append(f'There are no jobs that "{seen.user}" may list.')
    if {row.namespace for row in rows} - seen.reviewed:
        told.append("There are too many namespaces: whether you may list the jobs of the last ones is not reviewed.")
    return tuple(told)


def _job(request: web.Request) -> JobKey:
    """What is no name must get no further: neither into a redirect nor to the API server."""
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    if not DNS_LABEL.fits(namespace) or not DNS_NAME.fits(name):
        raise web.HTTPNotFound(text="expected /jobs/NAMESPACE/NAME/\n")
    return namespace, name
