"""The wire format of frames; links that come up late, replace another one, or are stuck."""

import socket
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_trainer.frames import DTYPES, Address, Frame, FrameKind
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.base import Arrived, LinkDown, LinkUp
from transport_kit import SECONDS, Net, dial, make_frame, our_threads, raw_frame, same

pytest_plugins = ["transport_kit"]


PAYLOADS = {
    "nothing": (),
    "zero-dim": (torch.tensor(1.5),),
    "empty": (torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)),
    "bool": (torch.tensor([True, False, True]),),
    "nan": (torch.tensor([float("nan"), -0.0, float("inf")]),),
    "strided": (torch.arange(12.0).reshape(3, 4).T,),
    "grad": (torch.ones(3, requires_grad=True),),
    "mixed": (torch.arange(5), torch.tensor(True), torch.randn(2, 3).bfloat16(), torch.empty(0)),
    "large": (torch.arange(4 << 20, dtype=torch.float32), torch.tensor(7, dtype=torch.int8)),
    **{name: (torch.arange(6).reshape(2, 3).to(dtype),) for name, dtype in DTYPES.items()},
}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.SYNC])
def test_tensors_arrive_bit_equal(net: Net, name: str, kind: FrameKind) -> None:
    a, _, _, b_in = net.pair()
    frame = make_frame(*(tensor.detach().contiguous() for tensor in PAYLOADS[name]), kind=kind)
    a.send("b", make_frame(*PAYLOADS[name], kind=kind))
    (event,) = b_in.wait(Arrived)
    assert event.sender == "a"
    assert same(event.frame, frame)
    if event.frame.tensors:
        event.frame.tensors[0].add(0)
        assert not event.frame.tensors[0].requires_grad


def test_a_frame_may_be_larger_than_any_stage() -> None:
    """A frame can have a billion parameters with AdamW's state. The test only reserves its memory."""
    size = 12_000_000_000
    names = [f"state:layers.{i}.mlp.experts.{i % 64}.down_proj.weight:exp_avg_sq" for i in range(20_000)]
    raw, *body = wire.encode_frame(
        make_frame(torch.empty(size, dtype=torch.uint8), kind=FrameKind.LAYER, payload=names)
    ).buffers
    header = wire.parse_header(bytes(raw[: wire.HEADER.size]))
    specs, meta = wire.parse_meta(bytes(raw[wire.HEADER.size :]), header.body_length)
    assert (header.body_length, sum(map(len, body)), specs[0].shape, meta) == (size, size, (size,), names)


def test_what_cannot_be_encoded_is_the_callers_error(net: Net) -> None:
    a, _, _, b_in = net.pair()
    with pytest.raises(ValueError, match="uint32"):
        a.send("b", make_frame(torch.zeros(2, dtype=torch.uint32)))
    with pytest.raises(ValueError, match="too large"):
        a.send("b", make_frame(payload="x" * (wire.MAX_META + 1)))
    with pytest.raises(ValueError, match="epoch"):
        a.send("b", Frame(address=Address(FrameKind.COMMIT, 2**40, 0, 0), epoch=1))
    a.send("b", make_frame())
    assert len(b_in.wait(Arrived)) == 1


def test_a_peer_that_never_answered_comes_up(net: Net) -> None:
    a, a_in = net.add("a")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        a.peers({"b": server.getsockname()})
        a.send("b", make_frame())
        a_in.wait(LinkDown)
        server.listen()
        with accept(server) as sock:
            a_in.wait(LinkUp)
            a.send("b", make_frame(microbatch=9))
            assert wire.NUMBER.unpack(sock.recv(wire.NUMBER.size)) == (0,)
            assert wire.parse_header(sock.recv(wire.HEADER.size)).address.microbatch == 9


def accept(server: socket.socket) -> socket.socket:
    """Accept a raw link, and complete the handshake."""
    sock, _ = server.accept()
    sock.sendall(bytes(wire.NONCE_SIZE))
    sock.recv(wire.MAX_HELLO)
    sock.sendall(wire.ACCEPTED)
    return sock


@pytest.mark.parametrize("lane", wire.Lane)
def test_a_link_that_replaces_another_one_is_told_of(net: Net, lane: wire.Lane) -> None:
    """If only the sender saw a link break, the receiver reports the new link as LinkUp, since frames may be lost."""
    _, _, b, b_in = net.pair()
    kind = {wire.Lane.BOUNDARY: FrameKind.ACTIVATION, wire.Lane.BULK: FrameKind.SYNC, wire.Lane.STATE: FrameKind.LAYER}[
        lane
    ]
    raw = raw_frame(make_frame(kind=kind))
    with dial(b, lane) as older:
        older.sendall(raw)
        b_in.wait(Arrived)
        with dial(b, lane) as newer:
            b_in.wait(LinkUp)
            older.settimeout(SECONDS)
            assert older.recv(1) == b""
            newer.sendall(raw)
            b_in.wait(Arrived, 2)
            assert [type(event) for event in b_in.events] == [Arrived, LinkUp, Arrived]
            assert b.broken == 1
    assert b_in.wait(LinkDown) == [LinkDown("a")]


def test_close_does_not_wait_for_a_stuck_peer(net: Net) -> None:
    a, _ = net.add("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        a.peers({"b": server.getsockname()})
        a.send("b", make_frame(torch.zeros(16 << 20)))
        with accept(server):  # and reads no more
            time.sleep(0.1)
            began = time.monotonic()
            a.close(0.2)
            assert time.monotonic() - began < SECONDS / 2
            assert our_threads() == []


VALID = b"".join(wire.encode_frame(make_frame(torch.ones(2, 3), torch.tensor(True), payload={"a": 1})).buffers)


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
