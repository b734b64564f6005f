"""Large frames over several connections: what arrives, what a lost connection does, and what is refused."""

import contextlib
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.frames.frame import FrameKind
from bamboo_trainer.transport import inbound, outbound, stripes, wire
from bamboo_trainer.transport.base import Arrived, LinkDown, LinkUp
from bamboo_trainer.transport.stripes import CHUNK, END, LEAVES, RECORD, FlowReceiver, FlowSender
from transport_kit import Net, dial, eventually, greet, make_frame, our_threads, refused, same

pytest_plugins = ["transport_pair_fixtures"]


several = pytest.mark.parametrize("flows", [4])
LARGE = torch.arange(1 << 18, dtype=torch.float32)  # 1 MiB: four chunks
LANES = {FrameKind.ACTIVATION: wire.Lane.BOUNDARY, FrameKind.SYNC: wire.Lane.BULK, FrameKind.LAYER: wire.Lane.STATE}


@given(st.lists(st.integers(0, 3 * CHUNK), max_size=6))
def test_chunks_are_the_whole_in_order(sizes: list[int]) -> None:
    buffers = [memoryview(random.Random(size).randbytes(size)) for size in sizes]
    slices = stripes.Slices(buffers)
    chunks = [b"".join(slices.chunk(index)) for index in range(slices.chunks)]
    assert b"".join(chunks) == b"".join(buffers)
    assert all(len(chunk) == CHUNK for chunk in chunks[:-1])
    for index in (-1, slices.chunks):
        with pytest.raises(IndexError):
            slices.chunk(index)


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60))
def test_what_is_left_of_buffers(buffers: list[bytes], count: int) -> None:
    whole = b"".join(buffers)
    count = min(count, len(whole))
    assert b"".join(stripes.after([memoryview(b) for b in buffers], count)) == whole[count:]


@dataclass
class Ends:
    """Both ends of the links of a test, the newest last. In each test only links from a to b carry something."""

    senders: list[FlowSender] = field(default_factory=list)
    receivers: list[FlowReceiver] = field(default_factory=list)

    @property
    def joined(self) -> tuple[socket.socket, ...]:
        """The connections that have joined the first one of the newest link to b."""
        return self.receivers[-1].joined

    @property
    def further(self) -> tuple[socket.socket, ...]:
        """The connections of a's newest link beside the first one."""
        return self.senders[-1].sockets


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    made = Ends()

    def sender(*arguments: Any) -> FlowSender:
        made.senders.append(FlowSender(*arguments))
        return made.senders[-1]

    def receiver(*arguments: Any) -> FlowReceiver:
        made.receivers.append(FlowReceiver(*arguments))
        return made.receivers[-1]

    monkeypatch.setattr(outbound, "FlowSender", sender)
    monkeypatch.setattr(inbound, "FlowReceiver", receiver)
    return made


@several
@pytest.mark.parametrize("kind", LANES)
def test_only_large_frames_open_more_connections(flows: int, kind: FrameKind, ends: Ends) -> None:
    with Net(flows) as net:
        a, _, _, b_in = net.pair()
        a.send("b", make_frame(LARGE[:-1], kind=kind))
        b_in.wait(Arrived)
        assert ends.joined == ()
        for count in (2, 3):
            a.send("b", make_frame(LARGE, kind=kind))
            assert torch.equal(b_in.wait(Arrived, count)[-1].frame.tensors[0], LARGE)
            assert len(ends.joined) == flows - 1
        senders = {name for name in our_threads() if name.startswith("bamboo-tx-")}
        assert senders == {f"bamboo-tx-b-{LANES[kind]}"}


@several
def test_every_connection_carries_a_part_of_a_body(net: Net, flows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[stripes.ArrivingFlow] = set()
    take = stripes.ArrivingFlow.take

    def noting(flow: stripes.ArrivingFlow, body: stripes.ArrivingBody) -> bool:
        def claim(index: int) -> list[memoryview]:
            used.add(flow)
            return stripes.ArrivingBody.claim(body, index)

        body.claim = claim  # type: ignore[method-assign]
        return take(flow, body)

    monkeypatch.setattr(stripes.ArrivingFlow, "take", noting)
    a, _, _, b_in = net.pair()
    frame = make_frame(torch.randn(1 << 20), torch.arange(7), torch.empty(0), torch.randn(3).bfloat16())
    a.send("b", frame)
    assert same(b_in.wait(Arrived)[0].frame, frame)
    assert len(used) == flows


def cut(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


@several
@pytest.mark.parametrize("seed", range(8))
def test_a_connection_lost_within_a_body_is_a_link_lost(
    net: Net, flows: int, seed: int, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them, at any moment: nothing that is incomplete is delivered, and the link forms again, with all."""
    rng = random.Random(seed)
    strike = rng.randrange(30)
    send_body = stripes.send_body
    chunks = 0

    def striking(number: int, body: list[wire.Buffer], by: list[socket.socket], pace: Callable[[int], None]) -> None:
        def struck(size: int) -> None:
            nonlocal chunks
            if chunks == strike:
                cut(by[rng.randrange(len(by))])
            chunks += 1
            pace(size)

        send_body(number, body, by, struck)

    monkeypatch.setattr(stripes, "send_body", striking)
    a, a_in, _b, b_in = net.pair()
    tensors = [torch.randn(9_000) for _ in range(4)]  # 9 chunks each
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
    assert len(ends.joined) == flows - 1


@several
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_connection_lost_while_idle_is_a_link_lost_at_the_next_body(net: Net, side: str, ends: Ends) -> None:
    a, a_in, _b, b_in = net.pair()
    a.send("b", make_frame(LARGE))
    b_in.wait(Arrived)
    cut((ends.further if side == "sender" else ends.joined)[1])
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
    monkeypatch.setattr(stripes, "MAX_FLOWS", 2)
    monkeypatch.setattr(stripes, "time", SimpleNamespace(monotonic=lambda: 0.0))  # long ago
    a, a_in, _, b_in = net.pair()
    for count in (1, 2):
        a.send("b", make_frame(LARGE))
        assert torch.equal(b_in.wait(Arrived, count)[-1].frame.tensors[0], LARGE)
    assert len(ends.joined) == len(ends.further) == 1
    assert [r.message for r in caplog.records if "of 4 connections" in r.message] == [
        "boundary link to b has 2 of 4 connections: closed by the peer"
    ]
    monkeypatch.undo()
    monkeypatch.setattr(wire, "STRIPED_FROM", 100)
    a.send("b", make_frame(LARGE))
    b_in.wait(Arrived, 3)
    assert len(ends.joined) == 3
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


HEAD, BODY = (bytes(buffer) for buffer in wire.encode_frame(make_frame(LARGE), may_stripe=True).buffers)
COUNT = len(BODY) // CHUNK


def record(number: int, index: int) -> bytes:
    return RECORD.pack(number, index)


def chunk(index: int, number: int = 0) -> bytes:
    return record(number, index) + BODY[index * CHUNK : (index + 1) * CHUNK]


def all_but(*left_out: int) -> bytes:
    return b"".join(chunk(index) for index in range(COUNT) if index not in left_out)


def test_chunks_arrive_in_any_order_on_any_connection(net: Net) -> None:
    """And one of the next body, and its connection's end, may come early."""
    with Group(net) as group:
        group.other.sendall(chunk(2) + chunk(0) + chunk(3, number=1) + record(0, LEAVES))
        group.other.close()
        group.first.sendall(HEAD + chunk(3) + chunk(1) + record(0, END))
        group.b_in.wait(Arrived)
        rest = chunk(1, number=1) + chunk(0, number=1) + chunk(2, number=1)
        group.first.sendall(HEAD + rest + record(1, END) + HEAD + b"".join(chunk(i, 2) for i in range(COUNT)))
        group.first.sendall(record(2, END))
        assert all(torch.equal(event.frame.tensors[0], LARGE) for event in group.b_in.wait(Arrived, 3))
        assert group.b_in.of(LinkDown) == []


BAD: dict[str, tuple[bytes, bytes]] = {  # on the first connection, and on the other one
    "chunk out of range": (HEAD + all_but(0) + record(0, COUNT), b""),
    "chunk twice": (HEAD + all_but(0) + chunk(1), b""),
    "chunk on both": (HEAD + all_but(0), chunk(1)),
    "chunk of a later body": (HEAD + all_but(0) + chunk(0, number=1), b""),
    "chunk of a body after the next": (HEAD + all_but(0), chunk(0, number=2)),
    "end before all have come": (HEAD + all_but(0) + record(0, END), record(0, LEAVES)),
    "end of another body": (HEAD + all_but(0) + record(1, END), b""),
    "end on another connection": (HEAD + all_but(0), record(0, END)),
    "the first leaves": (HEAD + all_but() + record(0, LEAVES), b""),
    "a frame in place of a chunk": (HEAD + HEAD, b""),
    "a frame on another connection": (HEAD + all_but(0), HEAD),
    "garbage": (HEAD, b"\xff" * 4096),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_chunks_close_the_link(net: Net, name: str, caplog: pytest.LogCaptureFixture) -> None:
    on_first, on_other = BAD[name]
    with Group(net) as group:
        group.other.sendall(on_other)
        with contextlib.suppress(ConnectionError):  # what came by the other one may have closed the link already
            group.first.sendall(on_first)
        assert refused(group.first)
        assert refused(group.other)
        assert group.b_in.wait(LinkDown) == group.b_in.events == [LinkDown("a")]
        assert [record.levelname for record in caplog.records if "closed" in record.message] == ["WARNING"]
        with dial(group.b) as sock:  # and it serves on, from the beginning
            sock.sendall(HEAD + all_but() + record(0, END))
            group.b_in.wait(Arrived)


@pytest.mark.parametrize("gone", ["first", "other"])
@pytest.mark.parametrize("sent", [b"", chunk(0)[:5], chunk(0)[:1000], chunk(0)])
def test_a_body_of_which_a_connection_goes_is_not_delivered(net: Net, gone: str, sent: bytes) -> None:
    with Group(net) as group:
        group.first.sendall(HEAD + (sent if gone == "first" else b""))
        getattr(group, gone).sendall(sent if gone == "other" else b"")
        getattr(group, gone).close()
        assert group.b_in.wait(LinkDown) == group.b_in.events
        assert refused(group.other if gone == "first" else group.first)


def test_a_link_that_is_half_open_ends_with_its_first_connection(net: Net) -> None:
    """Another one may wait for ever for a body that does not begin."""
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
        newer.sendall(HEAD + all_but() + record(0, END))  # none of them has harmed it
        group.b_in.wait(Arrived)
        newer.close()


def test_no_more_join_than_may(net: Net) -> None:
    with Group(net) as group:
        more = [greet(group.b, joins=group.nonce) for _ in range(stripes.MAX_FLOWS - 1)]
        assert [answer for *_, answer in more] == [wire.ACCEPTED] * (stripes.MAX_FLOWS - 2) + [b""]
        for sock, *_ in more:
            sock.close()


def test_a_link_that_is_closed_while_it_waits_for_a_chunk_ends(net: Net, ends: Ends) -> None:
    with Group(net) as group:
        group.first.sendall(HEAD + record(0, END))
        group.other.sendall(chunk(0)[:100])
        assert eventually(lambda: ends.joined != ())
        group.b.close(0.0)
        assert refused(group.other)
        assert group.b_in.events == []
