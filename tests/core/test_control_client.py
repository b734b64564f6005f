"""The control channel: the coordinator's server and the worker's end."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from bamboo_core.control import client as control_module
from bamboo_core.control.channel_events import ChannelClosed, ChannelEvent, Received, WorkerJoined
from bamboo_core.control.client import Control
from bamboo_core.control.codec import decode_from_coordinator
from bamboo_core.control.memory import Memory
from bamboo_core.control.plan_change import PlanChange, SendPlan, WholePlanWanted
from bamboo_core.control.protocol import Bye, CellFinished, Heartbeat, Hello, Message, Refused, StepCommitted, Stop
from bamboo_core.control.server import ControlServer, token_check
from bamboo_core.job.spec import RedundancySpec, TrainingSpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Cell, Peer, Plan


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Channel:
    """A server and what it heard."""

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
            await until(lambda: channel.of(WorkerJoined))
            assert channel.of(WorkerJoined)[0].hello.worker == "w0"
            channel.server.send("w0", Stop(reason="Test"))
            channel.server.send("nobody", Stop(reason="Test"))
            await until(lambda: heard)
            assert heard == [Stop(reason="Test")]
            await until(lambda: channel.messages(Heartbeat))
            assert channel.messages(Heartbeat)[0] == beat()
            control.send(Bye())
        await until(lambda: channel.of(ChannelClosed))
        assert channel.messages(Bye) == [Bye()]


def plans(count: int) -> list[Plan]:
    """One after the other, of workers of which none is there."""
    peers = [Peer(worker=f"w{n}", host="h", port=1) for n in range(8)]
    first = initial_plan(
        peers, ((0, 4), (4, 8)), 4, TrainingSpec(steps=1, global_batch_size=8, micro_batch_size=1), RedundancySpec()
    )
    return [msgspec.structs.replace(first, epoch=n + 1, workers=first.workers[n:]) for n in range(count)]


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What comes from the coordinator, before it is heard."""
    come: list[Any] = []

    def decode(data: bytes) -> Any:
        come.append(decode_from_coordinator(data))
        return come[-1]

    monkeypatch.setattr(control_module, "decode_from_coordinator", decode)
    return come


async def test_plans_after_the_first_one_go_as_changes_and_arrive_whole(
    frames: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    known = plans(4)
    async with Channel() as channel, client(channel.url) as (control, heard):
        await until(lambda: channel.of(WorkerJoined))
        for plan in known[:3]:
            channel.server.send("w0", SendPlan(plan=plan))
        await until(lambda: len(heard) == 3)
        assert [type(frame) for frame in frames] == [SendPlan, PlanChange, PlanChange]
        control.send(WholePlanWanted(problem="of a test"))
        await until(lambda: len(heard) == 4)
        channel.server.send("w0", SendPlan(plan=known[3]))
        await until(lambda: len(heard) == 5)
        assert heard == [SendPlan(plan=plan) for plan in (*known[:3], known[2], known[3])]
        assert [type(frame) for frame in frames[3:]] == [SendPlan, PlanChange]
        assert not channel.messages(WholePlanWanted)
    assert "w0 can make nothing of a change of the plan: of a test" in caplog.text


async def test_a_change_that_cannot_be_used_is_answered_by_the_whole_plan(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = plans(3)
    lost: list[Any] = []

    def losing(data: bytes) -> Any:
        message = decode_from_coordinator(data)
        if isinstance(message, PlanChange) and not lost:
            lost.append(message)
            raise ValueError("lost on its way")
        return message

    monkeypatch.setattr(control_module, "decode_from_coordinator", losing)
    async with Channel() as channel, client(channel.url) as (_, heard):
        await until(lambda: channel.of(WorkerJoined))
        channel.server.send("w0", SendPlan(plan=first))
        channel.server.send("w0", SendPlan(plan=second))
        channel.server.send("w0", SendPlan(plan=third))
        await until(lambda: len(heard) == 2)
        assert heard == [SendPlan(plan=first), SendPlan(plan=third)]
    assert "asked for the whole plan: it is a change to the plan of epoch 2, and here is that of 1" in caplog.text


async def test_a_wrong_token_is_refused() -> None:
    async with Channel() as channel, client(channel.url, token="wrong") as (_, heard):
        await until(lambda: heard)
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
            await until(lambda: first.of(WorkerJoined))
            await first.server.stop()
            await asyncio.sleep(0.1)
            for _ in range(3):
                control.send(Bye())
            second = Channel()
            await second.server.start(port=port)
            await until(lambda: len(second.messages(Bye)) == 3)
            assert isinstance(second.events[0], WorkerJoined)
            await second.server.stop()


async def test_a_newer_connection_replaces_the_older() -> None:
    async with Channel() as channel, client(channel.url), aiohttp.ClientSession() as session:
        await until(lambda: channel.of(WorkerJoined))
        async with session.ws_connect(channel.url, headers={"Authorization": "Bearer right"}) as socket:
            await socket.send_str('{"type":"Hello","worker":"w0","host":"h","port":2}')
            await until(lambda: len(channel.of(WorkerJoined)) > 1)
            assert not channel.of(ChannelClosed)
            assert channel.server.connected == {"w0"}


async def test_a_malformed_message_closes_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    async with Channel() as channel, aiohttp.ClientSession() as session:
        async with session.ws_connect(channel.url, headers={"Authorization": "Bearer right"}) as socket:
            await socket.send_str('{"type":"Hello","worker":"w0","host":"h","port":2}')
            await socket.send_str('{"type":"Heartbeat","step":"x"}')
            await socket.receive()
            assert socket.close_code == 1008
        await until(lambda: channel.of(ChannelClosed))
    assert "closed the channel of w0: malformed message" in caplog.text


def committed(step: int) -> StepCommitted:
    return StepCommitted(step=step, generation=0, loss=1.0, gradient_norm=1.0, microbatches=1, seconds=0.0)


async def test_what_may_be_late_leaves_before_the_next_message_with_a_heartbeat_or_when_it_is_asked_for() -> None:
    async with Channel() as channel:
        async with client(channel.url) as (control, _):

            def heard(*steps: int) -> bool:
                return [message.step for message in channel.messages(StepCommitted)] == [*steps]

            await until(lambda: channel.of(WorkerJoined))
            control.send(committed(0), late=True)
            control.send(committed(1), late=True)
            control.send(CellFinished(cell=Cell(0, 0), digest="0" * 64))
            await until(lambda: channel.messages(CellFinished))
            assert heard(0, 1)
            control.send(committed(2), late=True)
            await until(lambda: heard(0, 1, 2))  # a heartbeat has followed
            control.send(committed(3), late=True)
            control.wake()
            await until(lambda: heard(0, 1, 2, 3))
            control.send(committed(4), late=True)
        await until(lambda: channel.of(ChannelClosed))
        assert heard(0, 1, 2, 3, 4), "closing flushes"
