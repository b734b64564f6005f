"""Large bodies by one-sided writes between real processes: peers that die, freeze, wake up, come and go, or say what is
not so.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_trainer.frames.frame import FrameKind
from bamboo_trainer.transport import outbound, tcp, wire
from bamboo_trainer.transport.base import Arrived, LinkDown
from bamboo_trainer.transport.one_sided import protocol
from bamboo_trainer.transport.one_sided.contract import OneSided
from bamboo_trainer.transport.tcp import TcpTransport
from folders import SUPPORT
from one_sided_ways import WAYS, way_of
from transport_kit import SECONDS, SECRET, Net, dial, eventually, make_frame, our_threads, refused

if sys.platform != "linux":
    pytest.skip("processes write to each other on Linux", allow_module_level=True)

LARGE = 8 << 20  # numbers: 32 MiB, more than a ring
MANY = 40

CHILD = """
import sys, time, torch
from bamboo_trainer.transport.base import Arrived, LinkUp
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.transport.nixl.agent import Nixl
from bamboo_trainer.transport.one_sided.channel import OneSidedChannel
from bamboo_trainer.transport.tcp import TcpTransport
from process_writes import ProcessWrites
me, port, secret, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
way = ProcessWrites() if sys.argv[5] == "processes" else Nixl()

def heard(event):
    if isinstance(event, Arrived):
        print(event.frame.tensors[0].sum().item(), flush=True)
    if isinstance(event, LinkUp) and count:
        send(1, 2.0)

def send(frames, value):
    body = torch.full((8 << 20,), value)
    for number in range(frames):
        end.send("a", Frame(address=Address(FrameKind.SYNC, 0, 0, number), epoch=1, tensors=(body,)))

end = TcpTransport(me, secret, heard)
end.trust(secret, channel=OneSidedChannel(me, way))
end.peers({"a": ("127.0.0.1", port)})
print(end.port, flush=True)
send(count, 1.0)
time.sleep(600)
"""


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way(name: str, monkeypatch: pytest.MonkeyPatch) -> OneSided:
    return way_of(name, monkeypatch)


@pytest.fixture
def net(way: OneSided, monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    for module, what in ((tcp, "PLAN"), (tcp, "JOIN"), (outbound, "CONNECT"), (outbound, "ACCEPT")):
        monkeypatch.setattr(module, f"{what}_SECONDS", SECONDS)
    with Net(way=way) as made:
        yield made


class Child(subprocess.Popen[str]):
    """Another worker, in a process of its own. count: of large frames of ones that it sends to "a"; whenever that link
    is formed again, it sends one of twos.
    """

    def __init__(self, way: str, me: str, port: int, folder: Path, count: int) -> None:
        script = folder / "child.py"
        script.write_text(CHILD)
        command = [sys.executable, str(script), me, str(port), SECRET, str(count), way]
        super().__init__(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SUPPORT)})
        assert self.stdout is not None
        self.address = ("127.0.0.1", int(self.stdout.readline()))

    def heard(self) -> float:
        """The sum of the next frame that it got."""
        assert self.stdout is not None
        return float(self.stdout.readline())


Start = Callable[..., contextlib.AbstractContextManager[Child]]


@pytest.fixture
def child(name: str, tmp_path: Path) -> Start:
    """Starts another worker, and kills it in the end."""

    @contextlib.contextmanager
    def start(me: str, port: int, count: int = 0) -> Iterator[Child]:
        with Child(name, me, port, tmp_path, count) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


def send_many(end: TcpTransport, peer: str) -> None:
    ones = torch.ones(LARGE)
    for number in range(MANY):
        end.send(peer, make_frame(ones, microbatch=number, kind=FrameKind.SYNC))


def freeze_in_mid_transfer(receiver: Child, end: TcpTransport) -> None:
    """The receiver, "b", stops after the first of many frames from that end."""
    send_many(end, "b")
    assert receiver.heard() == LARGE
    receiver.send_signal(signal.SIGSTOP)


def links_to(peer: str) -> list[str]:
    return [name for name in our_threads() if f"-{peer}-" in name]


def test_a_receiver_killed_in_mid_transfer_is_a_link_down_and_others_go_on(net: Net, child: Start) -> None:
    a, a_in = net.add("a")
    with child("b", a.port) as b, child("c", a.port) as c:
        a.peers({"b": b.address, "c": c.address})
        send_many(a, "b")
        a.send("c", make_frame(torch.ones(LARGE), kind=FrameKind.SYNC))
        assert b.heard() == LARGE
        b.kill()
        assert a_in.wait(LinkDown) == [LinkDown("b")]
        assert c.heard() == LARGE
        a.send("c", make_frame(torch.ones(LARGE), kind=FrameKind.SYNC))
        assert c.heard() == LARGE
        assert a_in.events == [LinkDown("b")]


def test_a_sender_killed_in_mid_transfer_is_a_link_down(net: Net, child: Start) -> None:
    a, a_in = net.add("a")
    with child("b", a.port, MANY) as b:
        a.peers({"b": b.address})
        a_in.wait(Arrived)
        b.kill()
        assert a_in.wait(LinkDown) == [LinkDown("b")]
    got = a_in.of(Arrived)
    assert len(got) < MANY
    assert all((event.frame.tensors[0] == 1).all() for event in got)
    assert a_in.events == [*got, LinkDown("b")]


def test_a_frozen_receiver_delays_nobody_and_is_given_up_at_once(net: Net, child: Start) -> None:
    a, a_in = net.add("a")
    with child("b", a.port) as b, child("c", a.port) as c:
        a.peers({"b": b.address, "c": c.address})
        freeze_in_mid_transfer(b, a)
        a.send("c", make_frame(torch.ones(LARGE), kind=FrameKind.SYNC))
        assert c.heard() == LARGE
        a.peers({"c": c.address})
        assert eventually(lambda: not links_to("b"))
        assert a_in.events == []


def test_a_frozen_sender_is_given_up_at_once_and_sends_whole_frames_when_it_wakes_up(net: Net, child: Start) -> None:
    a, a_in = net.add("a")
    with child("b", a.port, MANY) as b:
        a.peers({"b": b.address})
        a_in.wait(Arrived)
        b.send_signal(signal.SIGSTOP)
        a.peers({})
        assert eventually(lambda: not links_to("b"))
        a.peers({"b": b.address})
        before = len(a_in.of(Arrived))
        b.send_signal(signal.SIGCONT)
        found = [event.frame.tensors[0] for event in a_in.wait(Arrived, before + 1)]
        values = [float(tensor[0]) for tensor in found]
        assert values == [1.0] * before + [2.0] * (len(found) - before)
        assert all(bool((tensor == value).all()) for tensor, value in zip(found, values, strict=True))


def test_a_transfer_goes_on_when_its_receiver_wakes_up(net: Net, child: Start) -> None:
    a, a_in = net.add("a")
    with child("b", a.port) as b:
        a.peers({"b": b.address})
        freeze_in_mid_transfer(b, a)
        a.send("b", make_frame(torch.ones(LARGE), kind=FrameKind.STATE))
        b.send_signal(signal.SIGCONT)
        assert [b.heard() for _ in range(MANY)] == [LARGE] * MANY
        assert a_in.events == []


def test_closing_ends_a_transfer_to_a_frozen_peer(net: Net, child: Start) -> None:
    a, _ = net.add("a")
    with child("b", a.port) as b:
        a.peers({"b": b.address})
        freeze_in_mid_transfer(b, a)
        a.close(0.1)
        assert our_threads() == []


def test_peers_that_come_and_go_leave_nothing_behind(net: Net) -> None:
    a, a_in = net.add("a")
    left: list[int] = []
    for number in range(4):
        name = f"b{number}"
        b, b_in = net.add(name)
        a.peers({name: ("127.0.0.1", b.port)})
        b.peers({"a": ("127.0.0.1", a.port)})
        a.send(name, make_frame(torch.ones(LARGE), kind=FrameKind.SYNC))
        b.send("a", make_frame(torch.ones(LARGE), kind=FrameKind.SYNC))
        b_in.wait(Arrived)
        a_in.wait(Arrived, number + 1)
        b.close(0.0)
        a.peers({})
        assert eventually(lambda: len(our_threads()) == 1)  # a's, which waits for connections
        left.append(len(os.listdir("/proc/self/fd")))
    assert left[1:] == left[1:2] * 3


def keeping(ends: list[Any], make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any) -> Any:
        ends.append(make(*arguments))
        return ends[-1]

    return made


def test_no_end_is_asked_for_anything_between_bodies(net: Net, way: OneSided, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = list[Any]()
    for make in ("source", "target"):
        monkeypatch.setattr(way, make, keeping(ends, getattr(way, make)))
    a, _, _, b_in = net.pair()
    a.send("b", make_frame(torch.ones(LARGE), kind=FrameKind.SYNC))
    b_in.wait(Arrived)
    asked = threading.Event()

    def noting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            asked.set()
            return ask(*arguments)

        return noted

    def quiet() -> bool:
        asked.clear()
        return not asked.wait(0.5)

    for end in ends:
        asked_for = "written" if hasattr(end, "written") else "progress"
        monkeypatch.setattr(end, asked_for, noting(getattr(end, asked_for)))
    assert len(ends) == 2
    assert eventually(quiet), "once the sender has heard that all is there"


def test_a_sender_that_says_something_else_is_cut_off(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, b, b_in = net.pair()
    frame = make_frame(torch.ones(LARGE))
    head = wire.encode_frame(frame, may_stripe=True).head
    with dial(b) as sock:
        sock.sendall(head)
        protocol.receive_landing(sock)
        assert refused(sock, protocol.TAKEN)
    assert b_in.wait(LinkDown) == b_in.events == [LinkDown("a")]


RECEIVERS_SAY = {
    "nothing": b"\x00\x00\x00\x00",
    "too much": b"\xff\xff\xff\xff",
    "garbage": protocol.encode_landing(b"garbage"),
    "taken too early": protocol.encode_landing(b"garbage") + protocol.TAKEN,
}


@pytest.mark.parametrize("said", RECEIVERS_SAY)
def test_a_receiver_that_says_something_else_is_a_link_down(net: Net, said: str) -> None:
    a, a_in = net.add("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        a.peers({"b": server.getsockname()[:2]})
        a.send("b", make_frame(torch.ones(LARGE)))
        sock, _ = server.accept()
        with sock:
            sock.sendall(bytes(wire.NONCE_SIZE))
            sock.recv(4096)
            sock.sendall(wire.ACCEPTED + RECEIVERS_SAY[said])
            assert a_in.wait(LinkDown) == a_in.events == [LinkDown("b")]


def test_the_end_of_a_link_is_heard_while_its_receiver_waits(net: Net) -> None:
    """For a body of which nothing has come yet."""
    _, _, b, b_in = net.pair()
    head = wire.encode_frame(make_frame(torch.ones(LARGE)), may_stripe=True).head
    with dial(b) as sock:
        sock.sendall(head)
        protocol.receive_landing(sock)
    assert b_in.wait(LinkDown) == b_in.events == [LinkDown("a")]


def test_frames_of_a_lane_stay_in_order_whether_large_or_small(net: Net) -> None:
    a, _, _, b_in = net.pair()
    for number in range(30):
        size = LARGE if number % 10 == 3 else 5
        a.send("b", make_frame(torch.full((size,), number), microbatch=number, kind=FrameKind.SYNC))
    got = [event.frame for event in b_in.wait(Arrived, 30)]
    assert [frame.address.microbatch for frame in got] == list(range(30))
    assert all((frame.tensors[0] == frame.address.microbatch).all() for frame in got)
