"""The control channel between the coordinator's server and a worker's client."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bamboo_core.control.client import Control
from bamboo_core.control.memory import Memory
from bamboo_core.control.protocol import (
    Bye,
    CellFinished,
    ChannelClosed,
    ChannelEvent,
    Heartbeat,
    Hello,
    Message,
    Received,
    Refused,
    StepCommitted,
    Stop,
    WorkerJoined,
)
from bamboo_core.control.server import ControlServer, token_check
from bamboo_core.planning.plan import Cell
from waiting import in_time


class Channel:
    """A control server that records its events."""

    def __init__(self, token: str = "right", heartbeat: float = 5.0) -> None:
        self.events: list[ChannelEvent] = []
        self.server = ControlServer(self.events.append, token_check(token), heartbeat=heartbeat)
        self.url = ""

    async def __aenter__(self) -> "Channel":
        self.url = await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def messages(self, kind: type[Message]) -> list[Any]:
        return [e.message for e in self.of(Received) if isinstance(e.message, kind)]


def beat() -> Heartbeat:
    return Heartbeat(step=4, doing="training", memory=Memory(peak=7, limit=9))


@contextlib.asynccontextmanager
async def client(url: str, token: str = "right", worker: str = "w0") -> AsyncIterator[tuple[Control, list[Message]]]:
    heard: list[Message] = []
    control = Control(url, lambda: token, lambda: Hello(worker=worker, host="h", port=1), beat, heard.append)
    before = set(threading.enumerate())
    control.start()
    (thread,) = set(threading.enumerate()) - before
    try:
        yield control, heard
    finally:
        await asyncio.to_thread(control.close, 5.0)
        await asyncio.to_thread(thread.join, 30)  # close() itself waits for two seconds at most
        assert not thread.is_alive()


async def test_hello_messages_and_heartbeats_go_both_ways() -> None:
    async with Channel() as channel:
        async with client(channel.url) as (control, heard):
            await in_time(lambda: channel.of(WorkerJoined))
            assert channel.of(WorkerJoined)[0].hello.worker == "w0"
            channel.server.send("w0", Stop(reason="Test"))
            channel.server.send("nobody", Stop(reason="Test"))
            await in_time(lambda: heard)
            assert heard == [Stop(reason="Test")]
            await in_time(lambda: channel.messages(Heartbeat))
            assert channel.messages(Heartbeat)[0] == beat()
            control.send(Bye())
        await in_time(lambda: channel.of(ChannelClosed))
        assert channel.messages(Bye) == [Bye()]


async def test_a_wrong_token_is_refused() -> None:
    async with Channel() as channel, client(channel.url, token="wrong") as (_, heard):
        await in_time(lambda: heard)
        assert heard[0] == Refused(reason="Unauthorized", message="the token is wrong")
        assert channel.events == []


async def test_another_protocol_is_refused() -> None:
    headers = {"Authorization": "Bearer right"}
    async with (
        Channel() as channel,
        aiohttp.ClientSession() as session,
        session.ws_connect(channel.url, headers=headers) as socket,
    ):
        await socket.send_str('{"type":"Hello","worker":"w0","host":"h","port":1,"version":99}')
        assert "ProtocolMismatch" in (await socket.receive()).data


async def test_what_is_said_while_the_server_is_away_arrives_later() -> None:
    async with Channel() as first:
        port = int(first.url.split(":")[2].split("/")[0])
        async with client(first.url) as (control, _):
            await in_time(lambda: first.of(WorkerJoined))
            await first.server.stop()
            await asyncio.sleep(0.1)
            for _ in range(3):
                control.send(Bye())
            second = Channel()
            await second.server.start(port=port)
            await in_time(lambda: len(second.messages(Bye)) == 3)
            assert isinstance(second.events[0], WorkerJoined)
            await second.server.stop()


async def test_a_newer_connection_replaces_the_older() -> None:
    async with Channel() as channel, client(channel.url), aiohttp.ClientSession() as session:
        await in_time(lambda: channel.of(WorkerJoined))
        async with session.ws_connect(channel.url, headers={"Authorization": "Bearer right"}) as socket:
            await socket.send_str('{"type":"Hello","worker":"w0","host":"h","port":2}')
            await in_time(lambda: len(channel.of(WorkerJoined)) > 1)
            assert not channel.of(ChannelClosed)
            assert channel.server.connected == {"w0"}


async def test_a_malformed_message_closes_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    async with Channel() as channel, aiohttp.ClientSession() as session:
        async with session.ws_connect(channel.url, headers={"Authorization": "Bearer right"}) as socket:
            await socket.send_str('{"type":"Hello","worker":"w0","host":"h","port":2}')
            await socket.send_str('{"type":"Heartbeat","step":"x"}')
            await socket.receive()
            assert socket.close_code == 1008
        await in_time(lambda: channel.of(ChannelClosed))
    assert "closed the channel of w0: malformed message" in caplog.text


def committed(step: int) -> StepCommitted:
    return StepCommitted(step=step, generation=0, loss=1.0, gradient_norm=1.0, microbatches=1, seconds=0.0)


async def test_what_may_be_late_leaves_before_the_next_message_with_a_heartbeat_or_when_it_is_asked_for() -> None:
    async with Channel() as channel:
        async with client(channel.url) as (control, _):

            def heard(*steps: int) -> bool:
                return [message.step for message in channel.messages(StepCommitted)] == [*steps]

            await in_time(lambda: channel.of(WorkerJoined))
            control.send(committed(0), late=True)
            control.send(committed(1), late=True)
            control.send(CellFinished(cell=Cell(0, 0), digest="0" * 64))
            await in_time(lambda: channel.messages(CellFinished))
            assert heard(0, 1)
            control.send(committed(2), late=True)
            await in_time(lambda: heard(0, 1, 2))  # a heartbeat has followed
            control.send(committed(3), late=True)
            control.wake()
            await in_time(lambda: heard(0, 1, 2, 3))
            control.send(committed(4), late=True)
        await in_time(lambda: channel.of(ChannelClosed))
        assert heard(0, 1, 2, 3, 4), "closing flushes"
