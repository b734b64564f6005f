"""What a peer says of its ring, without NIXL. How agents write is tested with the contract of one-sided writes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.transport.nixl.agent import Landing, MemoryKind, NixlError, parse_landing

LANDINGS = st.builds(
    Landing, st.binary(max_size=8), st.integers(-(1 << 63), (1 << 64) - 1), st.sampled_from(MemoryKind)
)


def test_a_landing_arrives_as_it_was_sent() -> None:
    landing = Landing(metadata=b"\x00all\xff", address=1 << 40, memory=MemoryKind.HOST)
    assert parse_landing(msgspec.msgpack.encode(landing)) == landing


@given(st.binary(max_size=64) | LANDINGS.map(msgspec.msgpack.encode))
def test_no_landing_crashes_the_parser(raw: bytes) -> None:
    try:
        landing = parse_landing(raw)
    except NixlError:
        return
    assert landing.metadata
    assert landing.address > 0


def test_a_ring_in_memory_that_this_end_does_not_know_is_refused() -> None:
    raw = msgspec.msgpack.encode({"metadata": b"m", "address": 4096, "memory": "VRAM"})
    with pytest.raises(NixlError, match="Invalid enum value 'VRAM'"):
        parse_landing(raw)
