"""What the TCP data plane refuses: hellos, frames and bytes that nobody should send."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_trainer.frames.frame import FrameKind
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.base import Arrived
from transport_kit import Net, dial, eventually, make_frame, our_threads, refused

pytest_plugins = ["transport_pair_fixtures"]


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
