"""The job pages that the operator serves: access, files and bounds."""

import asyncio

import pytest

from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_core.names import PAGE_AUDIENCE
from bamboo_core.page.server import MOST_TOKEN
from bamboo_operator.http.job_pages import MOST_CALLERS, REVIEWS_AT_ONCE
from page_http_kit import Reviewer, authorized, cluster


@pytest.mark.parametrize(
    ("path", "token", "status", "part"),
    [
        ("team/tiny", "GOOD", 200, "Suspended"),
        ("team/tiny", None, 401, "kubectl create token"),
        ("team/tiny", "BAD", 401, "not valid"),
        ("team/tiny", "WORKER", 401, PAGE_AUDIENCE),
        ("team/tiny", "x" * (MOST_TOKEN + 1), 401, "no token"),
        ("team/tiny", "OTHER", 403, "may not get bamboojobs.bamboo.dev"),
        ("team/nobody", "GOOD", 404, "no BambooJob nobody in namespace team"),
        ("team/nobody", "OTHER", 403, "may not get"),
        ("team/No_Name", "GOOD", 404, "expected /jobs/NAMESPACE/NAME/"),
        (f"team/{'x' * 300}", "GOOD", 404, "expected"),
        ("%2F%2Fevil/tiny", "GOOD", 404, "expected"),
    ],
)
async def test_who_may_get_the_job_may_see_its_page(path: str, token: str | None, status: int, part: str) -> None:
    reviewer = Reviewer()
    async with cluster(reviewer) as (session, url):
        headers = authorized(token) if token else {}
        async with session.get(f"{url}/jobs/{path}/state", headers=headers) as answer:
            assert (answer.status, part in await answer.text()) == (status, True)
    if status == 200:
        expected = {"namespace": "team", "name": "tiny", "verb": "get", "group": "bamboo.dev"}
        assert reviewer.attributes == [{**expected, "resource": "bamboojobs"}]
    if "expected" in part:
        assert reviewer.tokens == [], "what is no name must not reach the API server"


async def test_the_files_are_the_same_for_any_job_and_an_address_without_slash_leads_there() -> None:
    async with cluster(Reviewer()) as (session, url):
        bodies = []
        for job_path in ("team/tiny", "other/unknown"):
            async with session.get(f"{url}/jobs/{job_path}/") as answer:
                assert (answer.status, "Content-Security-Policy" in answer.headers) == (200, True)
                bodies.append(await answer.text())
        assert bodies[0] == bodies[1], "whether there is such a job is nobody's business"
        async with session.get(f"{url}/jobs/team/tiny", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "tiny/")
        async with session.get(f"{url}/jobs/team/%2F%2Fevil.example", allow_redirects=False) as answer:
            assert answer.status == 404


async def test_the_api_server_is_asked_each_time_and_nothing_is_kept() -> None:
    reviewer = Reviewer()
    async with cluster(reviewer) as (session, url):
        for token, status in (("GOOD", 200), ("BAD", 401), ("GOOD", 200)):
            async with session.get(f"{url}/jobs/team/tiny/state", headers=authorized(token)) as answer:
                assert answer.status == status
        reviewer.fault = ClusterUnreachable("it does not answer in time")
        async with session.get(f"{url}/jobs/team/tiny/state", headers=authorized("GOOD")) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert reviewer.tokens == ["GOOD", "BAD", "GOOD", "GOOD"]


async def test_callers_beyond_a_bound_are_told_to_come_again() -> None:
    reviewer = Reviewer()
    reviewer.hold = asyncio.Event()
    async with cluster(reviewer) as (session, url):

        async def ask() -> int:
            async with session.get(f"{url}/jobs/team/tiny/state", headers=authorized("GOOD")) as answer:
                return answer.status

        asked = [asyncio.create_task(ask()) for _ in range(MOST_CALLERS + 1)]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [503]
        assert reviewer.most <= REVIEWS_AT_ONCE
        reviewer.hold.set()
        assert sorted(await asyncio.gather(*asked)) == [200] * MOST_CALLERS + [503]
    assert reviewer.most == REVIEWS_AT_ONCE
