"""Large frames over several connections of a link: delivery in order, lost connections, and refused connections."""

import random
import socket

import pytest
import torch

from bamboo_core.names import FLOWS_PER_LINK, LARGE_BODY
from bamboo_trainer.frames import FrameKind
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.base import Arrived, LinkDown, LinkUp
from transport_kit import Net, accepted, dial, greet, make_frame, our_threads, raw_frame, refused
from waiting import until

pytest_plugins = ["transport_kit"]

LARGE = torch.arange(LARGE_BODY // 4, dtype=torch.float32)
KINDS = FrameKind.ACTIVATION, FrameKind.SYNC, FrameKind.LAYER  # one of each lane


def connections() -> int:
    """Return how many open connections from "a" have passed the handshake."""
    return sum(name.startswith("bamboo-rx-a-") for name in our_threads())


@pytest.mark.parametrize("kind", KINDS)
def test_only_large_frames_open_more_connections(kind: FrameKind) -> None:
    with Net() as net:
        a, _, _, b_in = net.pair()
        a.send("b", make_frame(LARGE[:-1], kind=kind))
        b_in.wait(Arrived)
        assert connections() == 1
        for count in (2, 3):
            a.send("b", make_frame(LARGE, kind=kind))
            assert torch.equal(b_in.wait(Arrived, count)[-1].frame.tensors[0], LARGE)
            until(lambda: connections() == 1 + FLOWS_PER_LINK)


@pytest.mark.parametrize("seed", range(4))
def test_a_connection_lost_amid_frames_is_a_link_lost(net: Net, seed: int) -> None:
    """Whichever connection is lost, no incomplete frame is delivered, and the link forms again with all connections."""
    rng = random.Random(seed)
    a, a_in, b, b_in = net.pair()
    tensors = [torch.randn(rng.choice([10, 900_000])) for _ in range(12)]
    for index, tensor in enumerate(tensors):
        a.send("b", make_frame(tensor, microbatch=index))
    b_in.wait(Arrived, rng.randrange(1, 5))
    until(lambda: connections() == 1 + FLOWS_PER_LINK)
    socks = accepted(b)
    rng.choice(socks).shutdown(socket.SHUT_RDWR)
    for sock in socks:
        sock.close()
    a_in.wait(LinkUp)
    b_in.wait(LinkUp)
    assert a_in.events == [LinkDown("b"), LinkUp("b")]
    a.send("b", make_frame(tensors[0].repeat(100), microbatch=99))
    until(lambda: b_in.of(Arrived)[-1].frame.address.microbatch == 99)
    frames = [event.frame for event in b_in.of(Arrived)][:-1]
    assert [frame.address.microbatch for frame in frames] == list(range(len(frames)))
    assert all(torch.equal(frame.tensors[0], tensors[frame.address.microbatch]) for frame in frames)
    until(lambda: connections() == 1 + FLOWS_PER_LINK)


def test_a_connection_that_may_not_join_is_a_link_lost(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    a, a_in, b, b_in = net.pair()
    with monkeypatch.context() as patch:
        patch.setattr(b, "find", lambda hello: None)
        a.send("b", make_frame(LARGE))
        a_in.wait(LinkDown)
    assert b_in.of(Arrived) == []
    a_in.wait(LinkUp)
    a.send("b", make_frame(LARGE))
    b_in.wait(Arrived)


class Group:
    """Raw connections of one link from "a" to "b": the first one, and one that has joined it."""

    def __init__(self, net: Net) -> None:
        _, _, self.b, self.b_in = net.pair()
        self.first, self.nonce, answer = greet(self.b, wire.Lane.BOUNDARY)
        self.other, _, joined = greet(self.b, wire.Lane.BOUNDARY, self.nonce)
        assert answer == joined == wire.ACCEPTED

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self.first.close()
        self.other.close()


RAW = [raw_frame(make_frame(LARGE, microbatch=number), number) for number in range(4)]


def test_frames_are_delivered_in_the_order_of_their_numbers(net: Net) -> None:
    """Frames are delivered in order, even if a later frame's connection ends before an earlier frame arrives."""
    with Group(net) as group:
        group.other.sendall(RAW[1] + RAW[3])
        group.first.sendall(RAW[0] + RAW[2][:99])
        group.b_in.wait(Arrived, 2)
        group.other.close()
        group.first.sendall(RAW[2][99:])
        frames = [event.frame for event in group.b_in.wait(Arrived, 4)]
        assert [frame.address.microbatch for frame in frames] == [0, 1, 2, 3]
        assert group.b_in.of(LinkDown) == []


@pytest.mark.parametrize("gone", ["first", "other"])
@pytest.mark.parametrize("sent", [RAW[0][:5], RAW[0][:99], RAW[0][:-1], b"no frame" * 99], ids=len)
def test_a_frame_of_which_the_connection_goes_ends_the_link(net: Net, gone: str, sent: bytes) -> None:
    with Group(net) as group:
        getattr(group, gone).sendall(sent)
        getattr(group, gone).close()
        assert refused(group.other if gone == "first" else group.first)
        assert group.b_in.wait(LinkDown) == group.b_in.events == [LinkDown("a")]
        with dial(group.b) as sock:  # and it serves on, from the beginning
            sock.sendall(RAW[0])
            group.b_in.wait(Arrived)


def test_a_link_ends_with_its_first_connection(net: Net) -> None:
    """Once a link's first connection ends, no other may join; the link is down when the sender has closed the rest."""
    with Group(net) as group:
        group.first.shutdown(socket.SHUT_WR)
        assert refused(group.first)
        late, _, answer = greet(group.b, joins=group.nonce)
        late.close()
        assert answer == b""
        group.other.close()
        assert group.b_in.wait(LinkDown) == group.b_in.events


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
        more = [greet(group.b, joins=nonce) for _ in range(FLOWS_PER_LINK + 1)]
        answers = [answer for _, _, answer in (*strangers.values(), *more)]
        assert answers == [b""] * len(strangers) + [wire.ACCEPTED] * FLOWS_PER_LINK + [b""]
        for sock, _, _ in strangers.values():
            sock.close()
        newer.sendall(RAW[0])  # none of them has harmed it
        group.b_in.wait(Arrived)
        for sock, _, _ in (*more, (newer, b"", b"")):
            sock.close()


def test_a_link_that_is_closed_while_it_waits_for_a_frame_ends(net: Net) -> None:
    with Group(net) as group:
        group.other.sendall(RAW[1])
        group.first.sendall(RAW[0][:999])
        group.b.close(0.0)
        assert refused(group.other)
        assert group.b_in.events == []
