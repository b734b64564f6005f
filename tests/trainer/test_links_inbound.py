"""Refusal of senders, hellos and frames by the receiving end of a link."""

import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from bamboo_trainer.frames import MAX_BODY, FrameKind
from bamboo_trainer.transport import tcp, wire
from bamboo_trainer.transport.base import Arrived, LinkDown, LinkUp
from transport_kit import SECRET, Net, dial, make_frame, raw_frame, refused

pytest_plugins = ["transport_kit"]


def hello(**changes: Any) -> Callable[[bytes], bytes]:
    def make(nonce: bytes) -> bytes:
        raw = wire.encode_hello(SECRET.encode(), nonce, "a", "b", wire.Lane.BOUNDARY)
        body = msgspec.msgpack.encode({**msgspec.msgpack.decode(raw[2:]), **changes})
        return wire.HELLO_LENGTH.pack(len(body)) + body

    return make


HELLOS: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda nonce: b"\x20\x00" + os.urandom(32),
    "empty": lambda nonce: b"\x00\x00",
    "too long": lambda nonce: b"\xff\xff" + bytes(4096),
    "wrong secret": lambda nonce: wire.encode_hello(b"guess", nonce, "a", "b", wire.Lane.BULK),
    "old nonce": lambda nonce: wire.encode_hello(SECRET.encode(), bytes(16), "a", "b", wire.Lane.BULK),
    "for another": lambda nonce: wire.encode_hello(SECRET.encode(), nonce, "a", "c", wire.Lane.BULK),
    "another name": hello(worker="b"),
    "another lane": hello(lane="bulk"),
    "no such lane": hello(lane="fast"),
    "short mac": hello(mac=b""),
    "more": hello(more=1),
    "http": lambda nonce: b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", HELLOS)
def test_bad_hellos_are_refused(net: Net, name: str) -> None:
    _, _, b, b_in = net.pair()
    with socket.create_connection(("127.0.0.1", b.port), 5) as sock:
        assert refused(sock, HELLOS[name](sock.recv(16)))
    assert b_in.events == []


def test_a_silent_or_unknown_stranger_is_refused(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PLAN_SECONDS", 0.2)
    monkeypatch.setattr("bamboo_trainer.transport.links.HELLO_SECONDS", 0.2)
    _, _, b, b_in = net.pair()
    with socket.create_connection(("127.0.0.1", b.port), 5) as silent:
        silent.recv(16)
        assert refused(silent)
    with socket.create_connection(("127.0.0.1", b.port), 5) as zombie:
        zombie.sendall(wire.encode_hello(SECRET.encode(), zombie.recv(16), "z", "b", wire.Lane.BULK))
        assert refused(zombie)
    assert b_in.events == []


def header(**changes: int | bytes) -> bytes:
    names = (
        "magic",
        "version",
        "kind",
        "epoch",
        "origin",
        "pipeline",
        "stage",
        "step",
        "microbatch",
        "part",
        "meta",
        "body",
    )
    right: dict[str, int | bytes] = {"magic": wire.MAGIC, "version": wire.VERSION, "kind": 1}
    values = {**dict.fromkeys(names, 0), **right}
    return wire.NUMBER.pack(0) + wire.HEADER.pack(*(values | changes).values())


def with_meta(meta: Any, body: int = 0) -> bytes:
    raw = meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta)
    return header(meta=len(raw), body=body) + raw


BAD_FRAMES = {
    "number": raw_frame(make_frame(), 1) * 2,
    "magic": header(magic=b"HTTP"),
    "version": header(version=wire.VERSION + 1),
    "kind": header(kind=99),
    "lane": header(kind=int(FrameKind.LAYER)),
    "meta too large": header(meta=wire.MAX_META + 1),
    "body too large": header(body=MAX_BODY + 1),
    "no meta": header(),
    "not msgpack": with_meta(b"\xc1"),
    "nested": with_meta(b"\x92\x90" + b"\x91" * 100_000),
    "not a pair": with_meta([[]]),
    "dtype": with_meta([[["object", [1]]], None], 8),
    "negative": with_meta([[["F32", [-1]]], None], 0),
    "two negatives": with_meta([[["F32", [-1, -1]]], None], 4),
    "size": with_meta([[["F32", [2]]], None], 4),
    "body without tensors": with_meta([[], None], 4),
    "overflow": with_meta([[["F32", [0, 2**62, 2**62]]], None], 0),
    "dimensions": with_meta([[["F32", [1] * 100]], None], 4),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames_close_the_link(net: Net, name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, _, b, b_in = net.pair()
    with dial(b) as sock:
        assert refused(sock, BAD_FRAMES[name])
    assert b_in.wait(LinkDown) == b_in.events == [LinkDown("a")]
    assert [record.levelname for record in caplog.records if "closed" in record.message] == ["WARNING"]
    with dial(b) as sock:  # and it serves on
        sock.sendall(raw_frame(make_frame(torch.ones(2))))
        b_in.wait(Arrived)
    assert b_in.of(LinkUp) == [LinkUp("a")]


def test_a_frame_cut_short_is_not_delivered(net: Net) -> None:
    _, _, b, b_in = net.pair()
    with dial(b) as sock:
        sock.sendall(raw_frame(make_frame(torch.ones(1000)))[:-1])
    assert b_in.wait(LinkDown) == b_in.events
