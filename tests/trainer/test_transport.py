"""The transport over TCP: arrival of frames, admission of senders, broken links."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bamboo_trainer.frames import FrameKind
from bamboo_trainer.transport import links, tcp
from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp
from bamboo_trainer.transport.tcp import TcpTransport
from transport_kit import SECONDS, SECRET, Net, accepted, make_frame, our_threads
from waiting import until

pytest_plugins = ["transport_kit"]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise all time limits, so that a slow machine is not mistaken for a silent peer."""
    limits = (tcp, "PLAN"), (tcp, "JOIN"), (links, "HELLO"), (links, "CONNECT"), (links, "ACCEPT")
    for module, name in limits:
        monkeypatch.setattr(module, f"{name}_SECONDS", SECONDS)


def test_payloads_arrive_as_they_were_sent(net: Net) -> None:
    a, _, _, b_in = net.pair()
    meta = {"norm": 1.25, "cells": [[0, 1], [2, 3]], "digest": b"\x00\xff", "none": None, "text": "ü"}
    a.send("b", make_frame(kind=FrameKind.READY, payload=meta))
    assert b_in.wait(Arrived)[0].frame.payload == meta


def test_a_worker_can_send_to_itself(net: Net) -> None:
    a, a_in, _, _ = net.pair()
    a.send("a", make_frame(torch.ones(2)))
    assert a_in.wait(Arrived)[0].sender == "a"


def test_order_per_lane_and_both_directions(net: Net) -> None:
    a, a_in, b, b_in = net.pair()
    for index in range(300):
        size = 40_000 if index % 7 == 0 else 3
        for end, peer in ((a, "b"), (b, "a")):
            end.send(peer, make_frame(torch.full((size,), index), microbatch=index))
            end.send(peer, make_frame(torch.full((3,), index), microbatch=index, kind=FrameKind.SYNC))
            end.send(peer, make_frame(torch.full((3,), index), microbatch=index, kind=FrameKind.LAYER))
    for inbox in (a_in, b_in):
        frames = [event.frame for event in inbox.wait(Arrived, 900)]
        for kind in (FrameKind.ACTIVATION, FrameKind.SYNC, FrameKind.LAYER):
            got = [frame for frame in frames if frame.address.kind is kind]
            assert [frame.address.microbatch for frame in got] == list(range(300))
            assert all((frame.tensors[0] == frame.address.microbatch).all() for frame in got)
        assert inbox.of(LinkDown) == inbox.of(LinkUp) == []


def test_bulk_does_not_delay_a_boundary_tensor(net: Net) -> None:
    a, _, _, b_in = net.pair()
    for kind in (FrameKind.SYNC, FrameKind.ACTIVATION):  # so that both links stand
        a.send("b", make_frame(torch.ones(1), kind=kind))
    b_in.wait(Arrived, 2)
    came = threading.Event()

    def deliver(event: Event) -> None:
        """Take no more bulk frames until the boundary tensor arrives, so that bulk frames are in flight until then."""
        if isinstance(event, Arrived) and event.frame.address.kind is FrameKind.ACTIVATION:
            came.set()
        came.wait(SECONDS)

    b_in.then = deliver
    for _ in range(4):
        a.send("b", make_frame(torch.zeros(16 << 20), kind=FrameKind.SYNC))
    a.send("b", make_frame(torch.ones(1)))
    kinds = [event.frame.address.kind for event in b_in.wait(Arrived, 7)[2:]]
    assert kinds.index(FrameKind.ACTIVATION) < 2


def test_a_state_is_sent_at_a_bounded_rate(net: Net) -> None:
    a, _, _, b_in = net.pair()
    a.trust(SECRET, state_rate=1e6)
    began = time.monotonic()
    a.send("b", make_frame(torch.arange(500_000.0), kind=FrameKind.LAYER))  # 2 MB: two seconds
    (event,) = b_in.wait(Arrived)
    assert time.monotonic() - began > 1.5
    assert torch.equal(event.frame.tensors[0], torch.arange(500_000.0))


def test_a_slow_state_delays_nothing_else(net: Net) -> None:
    a, _, _, b_in = net.pair()
    a.trust(SECRET, state_rate=1e3)
    a.send("b", make_frame(torch.zeros(500_000), kind=FrameKind.LAYER))  # 2 MB: half an hour
    a.send("b", make_frame(torch.zeros(500_000), kind=FrameKind.SYNC))
    a.send("b", make_frame(torch.ones(1)))
    assert {event.frame.address.kind for event in b_in.wait(Arrived, 2)} == {FrameKind.SYNC, FrameKind.ACTIVATION}


def test_close_does_not_wait_for_a_slow_state(net: Net) -> None:
    a, _, _, _ = net.pair()
    a.trust(SECRET, state_rate=1e3)
    a.send("b", make_frame(torch.zeros(1 << 20), kind=FrameKind.LAYER))
    a.send("b", make_frame(torch.ones(1)))
    time.sleep(0.2)
    began = time.monotonic()
    a.close(0.2)
    assert time.monotonic() - began < SECONDS / 2


def test_send_to_an_unknown_or_silent_peer_never_blocks(net: Net) -> None:
    a, _ = net.add("a")
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        a.peers({"silent": silent.getsockname()})
        began = time.monotonic()
        for _ in range(50):
            a.send("nobody", make_frame(torch.zeros(1000)))
            a.send("silent", make_frame(torch.zeros(1 << 20)))
        a.close(0.1)
        assert time.monotonic() - began < SECONDS / 2


def test_a_link_waits_for_the_plan_that_names_its_sender(net: Net) -> None:
    (a, _), (b, b_in) = net.add("a"), net.add("b")
    a.peers({"b": ("127.0.0.1", b.port)})
    a.send("b", make_frame(torch.ones(1)))
    time.sleep(0.3)
    assert b_in.events == []
    b.peers({"a": ("127.0.0.1", a.port)})
    b_in.wait(Arrived)


def test_who_left_the_plan_is_cut_off(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PLAN_SECONDS", 0.05)
    a, a_in, b, b_in = net.pair()
    a.send("b", make_frame())
    b.send("a", make_frame())
    b_in.wait(Arrived)
    a_in.wait(Arrived)
    b.peers({})
    a_in.wait(LinkDown)
    for _ in range(20):
        a.send("b", make_frame(torch.ones(1)))
        b.send("a", make_frame(torch.ones(1)))
        time.sleep(0.02)
    assert len(b_in.events) == len(a_in.of(Arrived)) == 1
    b.peers({"a": ("127.0.0.1", a.port)})
    a_in.wait(LinkUp)
    a.send("b", make_frame(torch.ones(1)))
    b_in.wait(Arrived, 2)


CHILD = """
import sys, time, torch
from bamboo_trainer.frames import Address, Frame, FrameKind
from bamboo_trainer.transport.tcp import TcpTransport
end = TcpTransport("b", sys.argv[2], lambda event: None)
end.peers({"a": ("127.0.0.1", int(sys.argv[1]))})
print(end.port, flush=True)
for kind in (FrameKind.ACTIVATION, FrameKind.SYNC):
    end.send("a", Frame(address=Address(kind, 0, 0, 0), epoch=1, tensors=(torch.ones(3),)))
time.sleep(60)
"""


def test_a_killed_peer_is_a_link_down_at_once(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LinkDown comes once for all links to the killed peer, and once for all links from it."""
    monkeypatch.setattr("bamboo_trainer.transport.links.tune", lambda sock: None)  # it is not keepalive that tells
    a, a_in = net.add("a")
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(a.port), SECRET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        a.peers({"b": ("127.0.0.1", int(child.stdout.readline()))})
        a.send("b", make_frame(torch.ones(1)))
        a.send("b", make_frame(torch.ones(1), kind=FrameKind.LAYER))
        until(lambda: sum("bamboo-send" in name for name in our_threads()) == 2)
        a_in.wait(Arrived, 2)
        child.send_signal(signal.SIGKILL)
        a_in.wait(LinkDown, 2)
    time.sleep(0.3)
    assert a_in.of(LinkDown) == [LinkDown("b")] * 2
    assert a_in.of(LinkUp) == []


def test_a_link_forms_again(net: Net) -> None:
    """A broken link forms again, and frames that are sent in between are dropped."""
    a, a_in, b, b_in = net.pair()
    a.send("b", make_frame(torch.ones(1)))
    b_in.wait(Arrived)
    with held(b):
        cut_links_to(b)
        a_in.wait(LinkDown)
        b_in.wait(LinkDown)
        a.send("b", make_frame(torch.ones(1), microbatch=8))
    a_in.wait(LinkUp)
    a.send("b", make_frame(torch.ones(1), microbatch=9))
    assert [event.frame.address.microbatch for event in b_in.wait(Arrived, 2)] == [0, 9]
    assert a_in.events == [LinkDown("b"), LinkUp("b")]
    assert b_in.of(LinkDown) == [LinkDown("a")]
    assert b_in.of(LinkUp) == [LinkUp("a")]


@contextmanager
def held(end: TcpTransport) -> Iterator[None]:
    """Keep links to a worker from forming inside this context: the worker does not answer senders."""
    over, admit = threading.Event(), end.admit
    end.admit = lambda link, hello: over.wait(SECONDS) and admit(link, hello)  # type: ignore[method-assign]
    yield
    over.set()


def cut_links_to(end: TcpTransport) -> None:
    """End all connections to a transport, as a network failure would."""
    for sock in accepted(end):
        with sock:
            sock.shutdown(socket.SHUT_RDWR)


def test_closing_sends_what_is_queued(net: Net) -> None:
    a, _, _, b_in = net.pair()
    for index in range(20):
        a.send("b", make_frame(torch.zeros(1 << 20), microbatch=index))
    a.close(SECONDS)
    assert len(b_in.wait(Arrived, 20)) == 20
    a.send("b", make_frame())
    a.close(0.0)  # again is fine
