"""Bounds on unauthenticated connections: their number, their time, and room for other callers."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.serving.listener import BoundedListener, ConnectionBounds, UnauthenticatedConnections, network_of
from certificates import issue, trusting
from waiting import PATIENCE, in_time


class Port:
    """A listener whose application answers at / and holds callers at /wait until `go` is set."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        app = web.Application()
        self.refused: list[str] = []
        self.listener = BoundedListener(app, bounds, self.refused.append)
        self.go, self.waiting = asyncio.Event(), 0
        app.router.add_get("/", self._answer)
        app.router.add_get("/wait", self._wait)
        self.number = 0

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def _wait(self, request: web.Request) -> web.Response:
        self.waiting += 1
        await self.go.wait()
        return web.Response(text="gone")

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number, ssl=tls)


@contextlib.asynccontextmanager
async def port(tls: ssl.SSLContext | None = None, **bounds: Any) -> AsyncIterator[Port]:
    made = Port(ConnectionBounds(**{"unauthenticated": 4, "request": PATIENCE, "idle": PATIENCE, **bounds}))
    made.number = await made.listener.start("127.0.0.1", 0, tls)
    try:
        yield made
    finally:
        made.go.set()
        await made.listener.stop()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes up to the connection's end; b"" if it is reset. Raises TimeoutError if it stays open."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    return b""


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: a"])
async def test_a_request_that_does_not_come_or_does_not_end_is_not_waited_for(said: bytes) -> None:
    async with port(request=0.3) as place:
        reader, writer = await place.connect()
        writer.write(said)
        assert await ended(reader) == b""
        writer.close()
        await in_time(lambda: place.listener.unauthenticated == 0)
        assert place.refused == ["TooSlow"]


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + 9000 * b"a" + b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
async def test_a_request_that_cannot_be_read_is_answered_and_fills_no_log(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with port() as place:
        for _ in range(5):
            reader, writer = await place.connect()
            writer.write(2 * said)
            assert (await ended(reader)).startswith(b"HTTP/1.0 400 Bad Request")
            writer.close()
        await in_time(lambda: place.listener.unauthenticated == 0)
    assert "Traceback" not in caplog.text
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 1, caplog.text


async def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    issue(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with port(tls, request=0.5) as place:
        reader, writer = await place.connect()
        assert await ended(reader) == b""
        writer.close()
        await in_time(lambda: place.listener.unauthenticated == 0)
        assert place.refused == ["TooSlow"]
    async with port(tls) as place, aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{place.number}/"
        async with session.get(url, ssl=trusting(tmp_path)) as answer:
            assert await answer.text() == "here"


async def test_half_open_connections_give_way_and_those_that_are_served_do_not() -> None:
    async with port() as place, contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        served = asyncio.create_task(_get(session, place, "/wait"))
        await in_time(lambda: place.waiting == 1)
        ends = [await place.connect() for _ in range(20)]
        for _, writer in ends:
            stack.callback(writer.close)
        await in_time(lambda: place.refused.count("TooManyCallers") == 17)
        assert place.listener.unauthenticated == 4
        assert await _get(session, place, "/") == "here"
        place.go.set()
        assert await served == "gone"


async def test_stopping_closes_what_stands_and_may_come_twice_or_without_a_start() -> None:
    async with port() as place:
        reader, writer = await place.connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"here")
        await place.listener.stop()
        assert await ended(reader) == b""
        writer.close()
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await place.connect()
    await BoundedListener(web.Application(), ConnectionBounds(unauthenticated=1)).stop()


async def _get(session: aiohttp.ClientSession, place: Port, what: str) -> str:
    async with session.get(f"http://127.0.0.1:{place.number}{what}") as answer:
        return await answer.text()


def test_whoever_has_most_idle_connections_loses_the_oldest() -> None:
    callers = UnauthenticatedConnections[str](4)
    for key, host in (("a", "10.0.0.1"), ("b1", "10.0.0.2"), ("b2", "10.0.0.2"), ("c", "10.0.0.3")):
        assert callers.admit(key, host) is None
    assert callers.admit("c2", "10.0.0.3") == "b1"
    assert callers.admit("d", "10.0.0.4") == "c"
    assert callers.admit("e", "10.0.0.5") == "a", "all have one: the oldest"
    assert len(callers) == 4


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_that_one_host_may_have_count_together(host: str, place: str) -> None:
    assert network_of(host) == place


@given(st.lists(st.tuples(st.sampled_from(["come", "busy", "idle", "leave"]), st.integers(0, 9), st.integers(0, 2))))
def test_the_room_is_never_exceeded_and_the_crowd_pays(acts: list[tuple[str, int, int]]) -> None:
    callers, there = UnauthenticatedConnections[int](3), dict[int, tuple[int, bool]]()
    for act, key, host in acts:
        match act:
            case "come" if key not in there:
                idle = [h for h, busy in there.values() if not busy]
                leaving = callers.admit(key, str(host))
                if leaving is not None and leaving != key:
                    gone, busy = there.pop(leaving)
                    assert not busy
                    assert idle.count(gone) == max(idle.count(h) for h in idle)
                if leaving == key:
                    assert not idle, "it is sent away only if all others are being served"
                else:
                    there[key] = (host, False)
            case "busy" | "idle" if key in there:
                callers.mark(key, busy=act == "busy")
                there[key] = (there[key][0], act == "busy")
            case "leave":
                callers.remove(key)
                there.pop(key, None)
        assert len(callers) == len(there) <= 3
        assert all(key in callers for key in there)
