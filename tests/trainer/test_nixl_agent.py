"""What a peer says of its ring, without NIXL. How agents write is tested with the contract of one-sided writes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.transport.nixl.agent import MOST_GPUS, Landing, MemoryKind, NixlError, parse_landing

LANDINGS = st.builds(
    Landing,
    st.binary(max_size=8),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from(MemoryKind),
    st.integers(-(1 << 63), (1 << 64) - 1),
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
    raw = msgspec.msgpack.encode({"metadata": b"m", "address": 4096, "memory": "FILE"})
    with pytest.raises(NixlError, match="Invalid enum value 'FILE'"):
        parse_landing(raw)


@pytest.mark.parametrize("number", [-1, MOST_GPUS])
def test_a_ring_of_a_gpu_that_no_machine_has_is_refused(number: int) -> None:
    landing = Landing(metadata=b"m", address=4096, memory=MemoryKind.GPU, number=number)
    with pytest.raises(NixlError, match="no memory"):
        parse_landing(msgspec.msgpack.encode(landing))
