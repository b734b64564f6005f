"""The operator's job pages."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from bamboo_core.names import PAGE_AUDIENCE
from bamboo_core.page.server import LIST_FILES, MOST_TOKEN
from bamboo_operator.auth.page_callers import CallerRules, ProxyHeaders
from bamboo_operator.http.job_pages import JobPages, PageSettings
from bamboo_operator.status.operated_job import OperatedJob
from http_kit import serving
from page_http_kit import Reviewer, authorized, cluster, operated


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


SECRET = {"X-Bamboo-Proxy-Secret": "correct-horse-battery"}
OTHERS = (("other", "big"), ("third", "small"))


@pytest.fixture
def behind_proxy(tmp_path: Path) -> PageSettings:
    file = tmp_path / "secret"
    file.write_text(SECRET["X-Bamboo-Proxy-Secret"])
    return PageSettings(callers=CallerRules(proxy=ProxyHeaders(secret=file)), grafana="https://grafana.example")


async def test_the_list_shows_the_jobs_of_the_namespaces_that_one_may_list(behind_proxy: PageSettings) -> None:
    reviewer = Reviewer()
    reviewer.lists = {("ann", "team"), ("ann", "third"), ("good", "")}
    async with cluster(reviewer, behind_proxy, OTHERS) as (session, url):

        async def listed(headers: dict[str, str]) -> tuple[set[str], list[str]]:
            async with session.get(f"{url}/jobs/state", headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                found = await answer.json()
            assert found["grafana"] == "https://grafana.example/d/bamboo-fleet"
            return {f"{row['namespace']}/{row['name']}" for row in found["rows"]}, found["unknown"]

        assert await listed(authorized("GOOD")) == ({"team/tiny", "other/big", "third/small"}, [])
        ann = {**SECRET, "X-Forwarded-User": "ann"}
        assert await listed(ann) == ({"team/tiny", "third/small"}, [])
        eve = {**SECRET, "X-Forwarded-User": "eve", "X-Forwarded-Groups": "ml,system:masters"}
        assert await listed(eve) == (set(), ['There are no jobs that "eve" may list.'])
        assert reviewer.groups[-1] == ["ml", "system:authenticated"]


async def test_the_lines_are_made_once_for_all_who_ask_and_leave_the_thread_to_others() -> None:
    made = []

    def every() -> Iterator[OperatedJob]:
        for number in range(25):
            made.append(asyncio.get_running_loop().time())
            yield operated("team", f"job-{number}")

    reviewer = Reviewer()
    reviewer.lists = {("good", "")}
    app = web.Application()
    JobPages(lambda key: None, every, reviewer).add_to(app)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += len(made) in (10, 20)
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    async with serving(app) as url, aiohttp.ClientSession() as session:

        async def rows() -> int:
            async with session.get(f"{url}/jobs/state", headers=authorized("GOOD")) as answer:
                return len((await answer.json())["rows"])

        assert await asyncio.gather(*(rows() for _ in range(5))) == [25] * 5
    other.cancel()
    assert len(made) == 25
    assert turns >= 2


@pytest.mark.parametrize("path", ["/jobs/state", "/jobs/team/tiny/state"])
async def test_nobody_can_forge_the_headers_of_a_proxy(path: str, behind_proxy: PageSettings) -> None:
    """Requests over a real connection, by who knows all names but not the secret."""
    reviewer = Reviewer()
    reviewer.lists = {("good", "")}
    forged = {"X-Forwarded-User": "good", "X-Forwarded-Groups": "g"}
    guesses = [{}, {"X-Bamboo-Proxy-Secret": ""}, {"X-Bamboo-Proxy-Secret": "guess"}, {"X-Forwarded-Secret": "x"}]
    async with cluster(reviewer, behind_proxy) as (session, url):
        for guess in guesses:
            async with session.get(url + path, headers={**forged, **guess}) as answer:
                assert answer.status == 401, guess
        async with session.get(url + path, headers={**forged, **authorized("OTHER")}) as answer:
            assert "good" not in await answer.text(), "the token says who it is, not the headers"
        assert all(attributes["verb"] == "list" or "OTHER" in reviewer.tokens for attributes in reviewer.attributes)
        proxy = behind_proxy.callers.proxy
        assert proxy is not None
        proxy.secret.unlink()
        async with session.get(url + path, headers={**forged, **SECRET}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "10"), "a secret that is gone admits nobody"


async def test_a_new_secret_counts_at_once(behind_proxy: PageSettings) -> None:
    reviewer = Reviewer()
    proxy = behind_proxy.callers.proxy
    assert proxy is not None
    async with cluster(reviewer, behind_proxy) as (session, url):
        for secret, shown, status in (("a" * 20, "a" * 20, 200), ("b" * 20, "a" * 20, 401), ("b" * 20, "b" * 20, 200)):
            proxy.secret.write_text(f"{secret}\n")
            headers = {"X-Bamboo-Proxy-Secret": shown, "X-Forwarded-User": "ann"}
            async with session.get(f"{url}/jobs/state", headers=headers) as answer:
                assert answer.status == status


async def test_the_way_to_the_list_and_to_dashboards(behind_proxy: PageSettings) -> None:
    async with cluster(Reviewer(), behind_proxy) as (session, url):
        for path in ("/", "/jobs"):
            async with session.get(url + path) as answer:
                assert (answer.status, answer.url.path) == (200, "/jobs/")
        for name in LIST_FILES:
            async with session.get(f"{url}/jobs/{name}") as answer:
                assert (answer.status, "Content-Security-Policy" in answer.headers) == (200, True)
        async with session.get(f"{url}/jobs/team/tiny/state", headers=authorized("GOOD")) as answer:
            dashboard = (await answer.json())["grafana"]
    assert dashboard == "https://grafana.example/d/bamboo-job?var-namespace=team&var-job=tiny"
