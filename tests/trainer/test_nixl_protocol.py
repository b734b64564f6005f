"""What the two ends say to each other about bodies that NIXL writes, without NIXL."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.transport import wire
from bamboo_trainer.transport.nixl import protocol
from bamboo_trainer.transport.nixl.agent import Landing

LANDINGS = st.builds(Landing, metadata=st.binary(max_size=8), address=st.integers(-(1 << 63), (1 << 64) - 1))


@given(st.lists(st.binary(max_size=40)), st.integers(1, 16))
def test_chunks_carry_all_bytes_in_order(buffers: list[bytes], size: int) -> None:
    """Gathered into slots at one end and scattered from them at the other."""
    sent = list(protocol.chunks(buffers, size))
    taken = [bytearray(len(buffer)) for buffer in buffers]
    wanted = list(protocol.chunks([memoryview(buffer) for buffer in taken], size))
    sizes = [sum(map(len, chunk)) for chunk in sent]
    assert all(each == size for each in sizes[:-1])
    assert all(sizes)
    for chunk, place in zip(sent, wanted, strict=True):
        slot = np.zeros(size, np.uint8)
        assert protocol.gather(chunk, slot) == sum(map(len, place))
        protocol.scatter(slot, place)
    assert taken == [bytearray(buffer) for buffer in buffers]


def test_a_landing_arrives_as_it_was_sent() -> None:
    landing = Landing(metadata=b"\x00all\xff", address=1 << 40)
    raw = protocol.encode_landing(landing)
    assert protocol.parse_landing(raw[protocol.LENGTH.size :]) == landing


@given(st.binary(max_size=64) | LANDINGS.map(msgspec.msgpack.encode))
def test_no_landing_crashes_the_parser(raw: bytes) -> None:
    try:
        landing = protocol.parse_landing(raw)
    except wire.WireError:
        return
    assert landing.metadata
    assert landing.address > 0
