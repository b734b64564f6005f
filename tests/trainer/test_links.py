"""Large frames over several connections: what arrives, what a lost connection does, and what is refused."""

import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bamboo_trainer.frames import FrameKind
from bamboo_trainer.transport import links, wire
from bamboo_trainer.transport.base import Arrived, LinkDown, LinkUp
from transport_kit import Net, dial, eventually, greet, make_frame, our_threads, refused

pytest_plugins = ["transport_kit"]


several = pytest.mark.parametrize("flows", [4])
LARGE = torch.arange(1 << 18, dtype=torch.float32)  # 1 MiB
LANES = {FrameKind.ACTIVATION: wire.Lane.BOUNDARY, FrameKind.SYNC: wire.Lane.BULK, FrameKind.LAYER: wire.Lane.STATE}


@dataclass
class Ends:
    """Record of the connections that carried each large body, at both ends. Each test sends only from a to b."""

    sent: list[list[socket.socket]] = field(default_factory=list)
    received: list[list[socket.socket]] = field(default_factory=list)


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    made, send, receive = Ends(), links.send_body, links.receive_body

    def sending(body: Any, flows: list[socket.socket], pace: Any) -> None:
        made.sent.append(flows)
        send(body, flows, pace)

    def receiving(body: Any, flows: list[socket.socket], first: Any) -> None:
        made.received.append(flows)
        receive(body, flows, first)

    monkeypatch.setattr(links, "send_body", sending)
    monkeypatch.setattr(links, "receive_body", receiving)
    return made


@several
@pytest.mark.parametrize("kind", LANES)
def test_only_large_frames_open_more_connections(flows: int, kind: FrameKind, ends: Ends) -> None:
    with Net(flows) as net:
        a, _, _, b_in = net.pair()
        a.send("b", make_frame(LARGE[:-1], kind=kind))
        b_in.wait(Arrived)
        assert ends.sent == []
        for count in (2, 3):
            a.send("b", make_frame(LARGE, kind=kind))
            assert torch.equal(b_in.wait(Arrived, count)[-1].frame.tensors[0], LARGE)
            assert len(set(ends.sent[-1])) == len(set(ends.received[-1])) == flows
        senders = {name for name in our_threads() if name.startswith("bamboo-tx-")}
        assert senders == {f"bamboo-tx-b-{LANES[kind]}"}


def cut(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


@several
@pytest.mark.parametrize("seed", range(8))
def test_a_connection_lost_within_a_body_is_a_link_lost(
    net: Net, flows: int, seed: int, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever connection is lost, no incomplete frame is delivered, and the link forms again with all connections."""
    rng = random.Random(seed)
    strike = rng.randrange(12)
    send_body = links.send_body
    pieces = 0

    def striking(body: list[wire.Buffer], by: Sequence[socket.socket], pace: Callable[[int], None]) -> None:
        def struck(size: int) -> None:
            nonlocal pieces
            if pieces == strike:
                cut(by[rng.randrange(len(by))])
            pieces += 1
            pace(size)

        send_body(body, by, struck)

    monkeypatch.setattr(links, "send_body", striking)
    a, a_in, _b, b_in = net.pair()
    tensors = [torch.randn(9_000) for _ in range(4)]
    for index, tensor in enumerate(tensors):
        a.send("b", make_frame(tensor, microbatch=index))
    a_in.wait(LinkUp)
    b_in.wait(LinkUp)
    assert a_in.events == [LinkDown("b"), LinkUp("b")]
    a.send("b", make_frame(tensors[0], microbatch=9))
    assert eventually(lambda: b_in.of(Arrived) != [] and b_in.of(Arrived)[-1].frame.address.microbatch == 9)
    frames = [event.frame for event in b_in.of(Arrived)]
    places = [frame.address.microbatch for frame in frames]
    assert places == [*range(len(places) - 1), 9]
    assert len(places) <= 4
    assert all(torch.equal(frame.tensors[0], tensors[frame.address.microbatch % 9]) for frame in frames)
    assert len(ends.received[-1]) == flows


@several
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_connection_lost_while_idle_is_a_link_lost_at_the_next_body(net: Net, side: str, ends: Ends) -> None:
    a, a_in, _b, b_in = net.pair()
    a.send("b", make_frame(LARGE))
    b_in.wait(Arrived)
    cut((ends.sent if side == "sender" else ends.received)[0][2])
    a.send("b", make_frame(torch.ones(2)))  # a small one does not need it
    b_in.wait(Arrived, 2)
    a.send("b", make_frame(LARGE))
    a_in.wait(LinkUp)
    b_in.wait(LinkUp)
    a.send("b", make_frame(LARGE, microbatch=9))
    assert eventually(lambda: b_in.of(Arrived)[-1].frame.address.microbatch == 9)
    assert a_in.events == [LinkDown("b"), LinkUp("b")]


@several
def test_a_link_serves_with_fewer_connections_if_more_are_refused(
    net: Net, ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "MAX_FLOWS", 2)
    a, a_in, _, b_in = net.pair()
    for count in (1, 2):
        a.send("b", make_frame(LARGE))
        assert torch.equal(b_in.wait(Arrived, count)[-1].frame.tensors[0], LARGE)
    assert [len(flows) for flows in (*ends.sent, *ends.received)] == [2] * 4
    assert [r.message for r in caplog.records if "of 4 connections" in r.message] == [
        "boundary link to b has 2 of 4 connections: closed by the peer"
    ]
    assert a_in.events == []


class Group:
    """Raw connections of one link from "a" to "b": the first one, and one that has joined it."""

    def __init__(self, net: Net, lane: wire.Lane = wire.Lane.BOUNDARY) -> None:
        _, _, self.b, self.b_in = net.pair()
        self.first, self.nonce, answer = greet(self.b, lane)
        self.other, _, joined = greet(self.b, lane, self.nonce)
        assert answer == joined == wire.ACCEPTED

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self.first.close()
        self.other.close()


ENCODED = wire.encode_frame(make_frame(LARGE), may_stripe=True)
BODY = bytes(ENCODED.buffers[1])
HALF = len(BODY) // 2


def head(connections: int) -> bytes:
    return ENCODED.head + bytes([connections])


def test_the_parts_of_the_next_body_may_come_early(net: Net) -> None:
    with Group(net) as group:
        group.other.sendall(BODY[HALF:] * 2)
        group.other.close()
        group.first.sendall((head(2) + BODY[:HALF]) * 2 + head(1) + BODY)
        assert all(torch.equal(event.frame.tensors[0], LARGE) for event in group.b_in.wait(Arrived, 3))
        assert group.b_in.of(LinkDown) == []


@pytest.mark.parametrize("connections", [0, 3, 255])
def test_a_body_on_connections_that_are_not_there_closes_the_link(
    net: Net, connections: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Group(net) as group:
        group.first.sendall(head(connections))
        assert refused(group.first)
        assert refused(group.other)
        assert group.b_in.wait(LinkDown) == group.b_in.events == [LinkDown("a")]
        assert [record.levelname for record in caplog.records if "closed" in record.message] == ["WARNING"]
        with dial(group.b) as sock:  # and it serves on, from the beginning
            sock.sendall(head(1) + BODY)
            group.b_in.wait(Arrived)


@pytest.mark.parametrize("gone", ["first", "other"])
@pytest.mark.parametrize("sent", [b"", BODY[:5], BODY[: HALF - 1]])
def test_a_body_of_which_a_connection_goes_is_not_delivered(net: Net, gone: str, sent: bytes) -> None:
    with Group(net) as group:
        group.first.sendall(head(2) + (sent if gone == "first" else b""))
        getattr(group, gone).sendall(sent if gone == "other" else b"")
        getattr(group, gone).close()
        assert group.b_in.wait(LinkDown) == group.b_in.events
        assert refused(group.other if gone == "first" else group.first)


def test_a_link_that_is_half_open_ends_with_its_first_connection(net: Net) -> None:
    """Another connection would otherwise wait for ever for a body that does not begin."""
    with Group(net) as group:
        group.first.close()
        assert group.b_in.wait(LinkDown) == group.b_in.events
        assert refused(group.other)
        late, _, answer = greet(group.b, joins=group.nonce)
        late.close()
        assert answer == b""


def test_who_may_not_join_a_link_is_refused(net: Net) -> None:
    with Group(net) as group:
        newer, nonce, answer = greet(group.b)
        assert answer == wire.ACCEPTED
        group.b_in.wait(LinkUp)
        strangers = {
            "of an older link": greet(group.b, joins=group.nonce),
            "of another lane": greet(group.b, wire.Lane.BULK, nonce),
            "of no link": greet(group.b, joins=bytes(wire.NONCE_SIZE)),
            "without the secret": greet(group.b, joins=nonce, secret="guess"),
            "with half a nonce": greet(group.b, joins=nonce[:8]),
        }
        assert {name: answer for name, (_, _, answer) in strangers.items()} == dict.fromkeys(strangers, b"")
        for sock, _, _ in strangers.values():
            sock.close()
        newer.sendall(head(1) + BODY)  # none of them has harmed it
        group.b_in.wait(Arrived)
        newer.close()


def test_no_more_join_than_may(net: Net) -> None:
    with Group(net) as group:
        more = [greet(group.b, joins=group.nonce) for _ in range(links.MAX_FLOWS - 1)]
        assert [answer for *_, answer in more] == [wire.ACCEPTED] * (links.MAX_FLOWS - 2) + [b""]
        for sock, *_ in more:
            sock.close()


def test_a_link_that_is_closed_while_it_waits_for_a_part_ends(net: Net, ends: Ends) -> None:
    with Group(net) as group:
        group.first.sendall(head(2) + BODY[:HALF])
        group.other.sendall(BODY[HALF:][:100])
        assert eventually(lambda: ends.received != [])
        group.b.close(0.0)
        assert refused(group.other)
        assert group.b_in.events == []
