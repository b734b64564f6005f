"""A local run's page over HTTP: access, headers, foreign host names, the end of the server, and contrast of colours."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files

import aiohttp
import pytest

from bamboo_core.page import server
from bamboo_core.page.document import Document
from bamboo_core.page.document import document as page_of
from bamboo_core.page.server import MOST_TOKEN, LocalPage, PageError
from bamboo_core.page.timeline import JobTimeline
from bamboo_core.view.job_view import ShownState
from operator_kit import job, viewed
from page_http_kit import authorized
from page_kit import Time, received


def document(*, over: bool = False) -> Document:
    state = ShownState(name="Running", tone="good", sentence="It runs.", over=over)
    return page_of(viewed(job()), JobTimeline(Time()), place="local", now=1.0, ended=state)


@asynccontextmanager
async def local(make: Callable[[], Document] = document) -> AsyncIterator[tuple[aiohttp.ClientSession, str, str]]:
    """Serve a local page, and yield a session, the page's address and its token."""
    page = LocalPage(make)
    url, _, token = (await page.start()).partition("#token=")
    try:
        async with aiohttp.ClientSession() as session:
            yield session, url, token
    finally:
        await page.stop()


async def test_the_document_is_for_the_token_and_the_files_are_for_everybody() -> None:
    async with local() as (session, url, token):
        async with session.get(f"{url}state", headers=authorized(token)) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert await answer.json() == received(document())
        for name in ("", "page.js", "page.css", "icon.svg"):
            async with session.get(url + name) as answer:
                body = await answer.text()
                assert answer.status == 200
                assert body
                assert token not in body


@pytest.mark.parametrize(
    "headers",
    [
        {},
        authorized("x"),
        authorized(""),
        {"Authorization": "Bearer"},
        {"Authorization": "Basic TOKEN"},
        authorized("x" * (MOST_TOKEN + 1)),
        authorized("TOKENé"),
    ],
)
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
        ("127.0.0.1", 200),
        ("127.0.0.1:9", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("localhost.evil.example", 421),
        ("[::2]", 421),
        ("[", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
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


def colours(scheme: str) -> dict[str, str]:
    """Return the colours of the page's light or dark scheme, by CSS variable."""
    css = (files("bamboo_core.page") / "static/page.css").read_text()
    light, _, rest = css.partition("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", rest.partition("\n}\n")[0]))
    return found


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (#rrggbb), as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = [
    *((ink, ground) for ink in ("ink", "soft") for ground in ("ground", "card", "faint", "grey-ground")),
    *((name, "card") for name in ("green", "amber", "red", "blue", "violet")),
    *((name, f"{name}-ground") for name in ("green", "amber", "red", "blue", "violet")),
    *((name, f"{ground}-ground") for ground in ("green", "amber", "red", "violet") for name in ("ink", "soft")),
    *(("amber", f"{ground}-ground") for ground in ("green", "red", "violet")),  # unprotected, on any cell
]


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
