"""What the TCP data plane refuses: hellos, frames and bytes that nobody should send."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_trainer.transport import tcp, wire
from bamboo_trainer.transport.base import Arrived, LinkDown, LinkUp
from bamboo_trainer.transport.frames import FrameKind
from transport_kit import SECRET, Net, dial, eventually, make_frame, our_threads


@pytest.fixture
def net() -> Iterator[Net]:
    with Net() as made:
        yield made


def refused(sock: socket.socket, last: bytes | bytearray = b"") -> bool:
    """The other side closes without a word; it may do so while it is still being told the last ones."""
    sock.settimeout(8)
    try:
        if last:
            sock.sendall(last)
            sock.shutdown(socket.SHUT_WR)
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


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
    monkeypatch.setattr("bamboo_trainer.transport.inbound.HELLO_SECONDS", 0.2)
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
    return wire.HEADER.pack(*(values | changes).values())


def with_meta(meta: Any, body: int = 0) -> bytes:
    raw = meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta)
    return header(meta=len(raw), body=body) + raw


BAD_FRAMES = {
    "magic": header(magic=b"HTTP"),
    "version": header(version=wire.VERSION + 1),
    "kind": header(kind=99),
    "lane": header(kind=int(FrameKind.STATE)),
    "meta too large": header(meta=wire.MAX_META + 1),
    "body too large": header(body=wire.MAX_BODY + 1),
    "no meta": header(),
    "not msgpack": with_meta(b"\xc1"),
    "nested": with_meta(b"\x92\x90" + b"\x91" * 100_000),
    "not a pair": with_meta([[]]),
    "dtype": with_meta([[["object", [1]]], None], 8),
    "negative": with_meta([[["f32", [-1]]], None], 0),
    "two negatives": with_meta([[["f32", [-1, -1]]], None], 4),
    "size": with_meta([[["f32", [2]]], None], 4),
    "body without tensors": with_meta([[], None], 4),
    "overflow": with_meta([[["f32", [0, 2**62, 2**62]]], None], 0),
    "dimensions": with_meta([[["f32", [1] * 100]], None], 4),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames_close_the_link(net: Net, name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, _, b, b_in = net.pair()
    with dial(b) as sock:
        assert refused(sock, BAD_FRAMES[name])
    assert b_in.wait(LinkDown) == b_in.events == [LinkDown("a")]
    assert [record.levelname for record in caplog.records if "closed" in record.message] == ["WARNING"]
    with dial(b) as sock:  # and it serves on
        sock.sendall(b"".join(wire.encode_frame(make_frame(torch.ones(2)))))
        b_in.wait(Arrived)
    assert b_in.of(LinkUp) == [LinkUp("a")]


def test_a_frame_cut_short_is_not_delivered(net: Net) -> None:
    _, _, b, b_in = net.pair()
    raw = b"".join(wire.encode_frame(make_frame(torch.ones(1000))))
    with dial(b) as sock:
        sock.sendall(raw[:-1])
    assert b_in.wait(LinkDown) == b_in.events


VALID = b"".join(wire.encode_frame(make_frame(torch.ones(2, 3), torch.tensor(True), payload={"a": 1})))


@settings(deadline=None)
@given(
    st.binary(min_size=wire.HEADER.size, max_size=wire.HEADER.size),
    st.binary(max_size=64),
    st.integers(0, 64),
)
def test_no_bytes_crash_the_parser(raw: bytes, meta: bytes, body: int) -> None:
    for parse in (
        lambda: wire.parse_header(raw),
        lambda: wire.parse_header(wire.MAGIC + b"\x01" + raw[5:]),
        lambda: wire.parse_meta(meta, body),
        lambda: wire.parse_hello(meta, b"", b"", "b"),
    ):
        try:
            parse()
        except wire.WireError:
            continue


@pytest.mark.hypothesis  # which sees only what is outside
def test_damaged_headers_never_deliver(net: Net) -> None:
    """Over a real link: damage to what names the frame's form closes it, delivers nothing and harms no other."""
    _, _, b, b_in = net.pair()
    form = [
        *range(6),
        *range(wire.HEADER.size - 12, wire.HEADER.size),
    ]  # magic, version, kind and the lengths

    @settings(deadline=None, max_examples=60, database=None)
    @given(st.sampled_from(form), st.integers(1, 255))
    def damaged(position: int, mask: int) -> None:
        raw = bytearray(VALID)
        raw[position] ^= mask
        kind = raw[5]
        if (
            position == 5
            and kind in FrameKind.__members__.values()
            and wire.lane_of(FrameKind(kind)) is wire.Lane.BOUNDARY
        ):
            return  # another valid kind
        with dial(b) as sock:
            assert refused(sock, raw)
        assert b_in.of(Arrived) == []

    damaged()
    assert eventually(lambda: len(our_threads()) == 2)
    with dial(b) as sock:
        sock.sendall(VALID)
        b_in.wait(Arrived)


@given(st.lists(st.binary(max_size=200)), st.integers(1, 100))
def test_coalescing_keeps_the_bytes(buffers: list[bytes], limit: int) -> None:
    joined = list(wire.coalesce(buffers, limit))
    assert b"".join(joined) == b"".join(buffers)
    assert all(len(buffer) < limit or buffer in buffers for buffer in joined)
