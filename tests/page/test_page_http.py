"""The job page over HTTP, by the real servers: who gets what, with which headers, and what strangers can cause."""

import asyncio
import io
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from bamboo.cli.commands import app as command_line
from bamboo.coordinator.events import Emit, Finish, Outcome
from bamboo.kube.errors import ApiError
from bamboo.local.views.page_view import PageView
from bamboo.local.views.summary import summarize
from bamboo.names import PAGE_AUDIENCE
from bamboo.page import document as d
from bamboo.page import server
from bamboo.page.server import FILES, MOST_TOKEN, LocalPage, PageError
from bamboo.terminal.picture import Footer, render
from bamboo_operator.auth.page_access import (
    ALLOWED_SECONDS,
    AT_ONCE,
    REFUSED_SECONDS,
    UNKNOWN_TOKENS_AT_ONCE,
    WAITING,
    PageAccess,
)
from bamboo_operator.http.job_pages import JobPages
from bamboo_operator.status.facts import StatusFacts
from bamboo_operator.status.job_view import JobView
from http_kit import serving
from operator_kit import NOW, job, said
from page_kit import Time

TEAM = ("team", "tiny")


def document(*, over: bool = False) -> d.Document:
    return d.Document(
        now=1.0,
        job=d.PageJob(name="tiny", namespace="team", place="local"),
        state=d.PageState(name="Running", tone="good", sentence="It runs.", over=over),
        progress=d.PageProgress(step=1),
        counts=d.PageCounts(preemptions=0, takeovers=0),
    )


@asynccontextmanager
async def local(make: Callable[[], d.Document] = document) -> AsyncIterator[tuple[aiohttp.ClientSession, str, str]]:
    """A session, the page's address and its token."""
    page = LocalPage(make)
    url, _, token = (await page.start()).partition("#token=")
    try:
        async with aiohttp.ClientSession() as session:
            yield session, url, token
    finally:
        await page.stop()


def authorized(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# on this machine


async def test_the_document_is_for_the_token_and_the_files_are_for_everybody() -> None:
    async with local() as (session, url, token):
        async with session.get(f"{url}state", headers=authorized(token)) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert await answer.json() == d.plain(document())
        for name in FILES:
            async with session.get(url + name) as answer:
                body = await answer.text()
                assert answer.status == 200
                assert body
                assert token not in body


@pytest.mark.parametrize(
    "headers",
    [{}, authorized("x"), authorized(""), {"Authorization": "Bearer"}, {"Authorization": "Basic TOKEN"},
     authorized("x" * (MOST_TOKEN + 1)), authorized("TOKENé")],
)  # fmt: skip
async def test_without_the_token_there_is_no_document(headers: dict[str, str]) -> None:
    async with local() as (session, url, token):
        given = {name: value.replace("TOKEN", token) for name, value in headers.items()}
        async with session.get(f"{url}state", headers=given) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert await answer.json() == {"error": "The token is not that of this run."}
        async with session.get(f"{url}state?token={token}") as answer:
            assert answer.status == 401, "a token in the address would end up in logs"


@pytest.mark.parametrize("path", ["", "page.js", "page.css", "icon.svg", "state", "nothing"])
async def test_every_answer_has_the_headers(path: str) -> None:
    async with local() as (session, url, token), session.get(url + path, headers=authorized(token)) as answer:
        if answer.status == 404:
            return
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "aiohttp" not in answer.headers["Server"]
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("127.0.0.1:9", 200), ("localhost:1", 200), ("LOCALHOST", 200), ("[::1]:80", 200),
        ("evil.example", 421), ("evil.example:80", 421), ("localhost.evil.example", 421), ("[::2]", 421), ("[", 421),
        ("127.0.0.1.evil.example", 421), ("", 421),
    ],
)  # fmt: skip
async def test_another_site_s_name_leads_nowhere(host: str, status: int) -> None:
    async with local() as (session, url, token):
        for path in ("", "state"):
            async with session.get(url + path, headers={**authorized(token), "Host": host}) as answer:
                assert answer.status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_the_page_is_read_only(method: str) -> None:
    async with local() as (session, url, token), session.request(method, f"{url}state") as answer:
        assert (answer.status, bool(token)) == (405, True)


async def test_the_page_is_gone_at_once_if_nobody_looks_and_later_if_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr(server, "WATCHED_SECONDS", 60.0)
    for asked, told, linger, least in ((False, False, 60.0, 0.0), (True, False, 1.5, 1.4), (True, True, 60.0, 0.0)):
        monkeypatch.setattr(server, "LINGER_SECONDS", linger)
        over = False
        page = LocalPage(lambda: document(over=over))  # noqa: B023
        url, _, token = (await page.start()).partition("#token=")
        async with aiohttp.ClientSession() as session:
            if asked:
                (await session.get(f"{url}state", headers=authorized(token))).close()
            over = True
            began = clock()
            stopping = asyncio.create_task(page.stop())
            await asyncio.sleep(0.05)
            if told:
                async with session.get(f"{url}state", headers=authorized(token)) as answer:
                    assert (await answer.json())["state"]["over"]
            await stopping
            assert least <= clock() - began < least + 20
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(url)


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PageError, match=f"--page-port {port}: Address already in use"):
            await LocalPage(document, port=port).start()


async def test_the_view_of_a_run_from_its_start_to_its_end() -> None:
    clock = Time()
    view = PageView(job(nodePools=[{"name": "a", "pricePerHour": "1.0"}]), clock=clock)
    assert (view.document().state.name, view.document().progress.steps) == ("Starting", 10)
    view.start(lambda wish: None)
    view.status(said(step=0, loss=None, losses=()))
    view.status(said(step=1, loss=4.0))
    view.emit(Emit("WorkerLost", "w1 is lost", True))
    shown = view.document()
    assert (shown.points, len(shown.marks), shown.cost is not None) == (((1, 1000.0, 4.0, None, None),), 1, True)
    finish = Finish(Outcome.FAILED, "LossNotFinite", "the loss is not a number")
    view.finish(summarize("tiny", said(), finish, batch=8, seconds=1.0))
    view.stop()
    assert view.document().state == d.PageState(
        name="Failed", tone="bad", sentence="the loss is not a number", over=True
    )


@pytest.mark.parametrize("page", ["", "http://127.0.0.1:40429/#token=abc"])
def test_the_live_view_names_the_page(page: str) -> None:
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(render("tiny", said(), [], elapsed=1.0, footer=Footer(page=page)))
    assert (f"page: {page}" in console.export_text()) is bool(page)


def test_a_port_without_a_page_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "{apiVersion: bamboo.dev/v1alpha1, kind: BambooJob, metadata: {name: t}, spec: {task: {entrypoint: 'm:b'},"
        " topology: {stages: 2}, training: {steps: 1, globalBatchSize: 2, microBatchSize: 1}}}"
    )
    result = CliRunner().invoke(command_line, ["run", str(path), "--no-page", "--page-port", "80"])
    assert result.exit_code == 2
    assert "--page-port and --no-page: expected at most one of them" in result.output


# on a cluster: the API server's answers are given here, everything else is real


class Reviewer:
    """What an API server says of tokens: GOOD may get the job, OTHER is somebody else, WORKER has another audience."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.attributes: list[dict[str, str]] = []
        self.fault: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.now = self.most = 0

    async def review_token(self, token: str, audience: str) -> dict[str, Any]:
        self.tokens.append(token)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.hold:
                await self.hold.wait()
        finally:
            self.now -= 1
        if self.fault:
            raise self.fault
        if token == "WORKER":
            return {"authenticated": True, "audiences": ["bamboo.dev"], "user": {"username": "w"}}
        if token not in ("GOOD", "OTHER"):
            return {"authenticated": False}
        user = {"username": token.lower(), "uid": "1", "groups": ["g"], "extra": {"a": ["b"]}}
        return {"authenticated": True, "audiences": [audience], "user": user}

    async def review_access(self, user: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]:
        assert (user["groups"], user["extra"]) == (["g"], {"a": ["b"]})
        self.attributes.append(attributes)
        return {"allowed": user["username"] == "good"}


@asynccontextmanager
async def cluster(reviewer: Reviewer) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A session and the address of the operator's web port; there is one job, team/tiny."""
    spec = job()
    known = JobView(
        namespace="team", name="tiny", spec=spec, facts=StatusFacts(now=NOW, generation=1, spec=spec),
        written={"state": "Suspended"},
    )  # fmt: skip
    app = web.Application()
    JobPages(lambda key: known if key == TEAM else None, reviewer).add_to(app)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        yield session, url


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


async def test_verdicts_are_remembered_for_a_while() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock)
    for token, seconds in (("GOOD", ALLOWED_SECONDS), ("BAD", REFUSED_SECONDS), ("OTHER", REFUSED_SECONDS)):
        first = await gate.admit(token, TEAM)
        asked = len(reviewer.tokens)
        clock.now += seconds - 0.1
        assert await gate.admit(token, TEAM) == first
        assert len(reviewer.tokens) == asked
        clock.now += 0.2
        assert await gate.admit(token, TEAM) == first
        assert len(reviewer.tokens) == asked + 1
    assert await gate.admit("GOOD", ("team", "another")) is None
    assert len(reviewer.tokens) == 7, "a verdict is for one job only"


async def test_strangers_are_held_back_and_friends_are_not() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock)
    assert await gate.admit("GOOD", TEAM) is None
    clock.now += ALLOWED_SECONDS + 1
    found = [await gate.admit(f"bad{n}", TEAM) for n in range(200)]
    statuses = [refusal.status for refusal in found if refusal]
    assert statuses.count(401) == UNKNOWN_TOKENS_AT_ONCE
    assert statuses.count(429) == 200 - UNKNOWN_TOKENS_AT_ONCE
    assert found[-1] is not None
    assert found[-1].retry == 1
    assert await gate.admit("GOOD", TEAM) is None
    clock.now += 1
    again = await gate.admit("bad", TEAM)
    assert again is not None
    assert again.status == 401


async def test_reviews_are_few_at_a_time_and_the_queue_is_bounded() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock)
    reviewer.hold = asyncio.Event()
    asking = []
    for n in range(WAITING + 5):
        clock.now += 1
        asking.append(asyncio.create_task(gate.admit(f"bad{n}", TEAM)))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    reviewer.hold.set()
    statuses = [refusal.status for refusal in await asyncio.gather(*asking) if refusal]
    assert (statuses.count(401), statuses.count(503)) == (WAITING, 5)
    assert reviewer.most == AT_ONCE


async def test_while_the_api_server_is_away_nobody_is_let_in_and_nothing_is_remembered() -> None:
    reviewer = Reviewer()
    async with cluster(reviewer) as (session, url):
        for fault, status in ((ApiError(500, "InternalError", "no"), 503), (TimeoutError(), 503), (None, 200)):
            reviewer.fault = fault
            async with session.get(f"{url}/jobs/team/tiny/state", headers=authorized("GOOD")) as answer:
                assert (answer.status, answer.headers.get("Retry-After")) == (status, "2" if fault else None)


# the style sheet


def colours(scheme: str) -> dict[str, str]:
    """The variables of the light or the dark scheme."""
    css = (files("bamboo.page") / "static/page.css").read_text()
    light, _, rest = css.partition("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", rest.partition("\n}\n")[0]))
    return found


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = [(ink, ground) for ink in ("ink", "soft") for ground in ("ground", "card", "faint", "grey-ground")]
TEXTS += [(name, "card") for name in ("green", "amber", "red", "blue", "violet")]
TEXTS += [(name, f"{name}-ground") for name in ("green", "amber", "red", "blue", "violet")]
TEXTS += [(name, f"{ground}-ground") for ground in ("green", "amber", "red", "violet") for name in ("ink", "soft")]
TEXTS += [("amber", f"{ground}-ground") for ground in ("green", "red", "violet")]  # unprotected, on any cell
SHAPES = [
    (name, "card") for name in ("curve", "curve-2", "decide", "recompute", "kind-1", "kind-3", "kind-5", "kind-6")
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(scheme: str) -> None:
    found = colours(scheme)
    poor = {pair: round(contrast(found[pair[0]], found[pair[1]]), 2) for pair in TEXTS}
    assert not {pair: value for pair, value in poor.items() if value < 4.5}
    faint = {pair: round(contrast(found[pair[0]], found[pair[1]]), 2) for pair in SHAPES}
    assert not {pair: value for pair, value in faint.items() if value < 3}
