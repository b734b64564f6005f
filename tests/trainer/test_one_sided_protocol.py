"""What the two ends say to each other about one-sided writes."""

import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.transport import wire
from bamboo_trainer.transport.one_sided import protocol
from bamboo_trainer.transport.one_sided.slot_copies import SlotCopies


@given(st.lists(st.binary(max_size=40)), st.integers(1, 16))
def test_chunks_carry_all_bytes_in_order(buffers: list[bytes], size: int) -> None:
    """Gathered into slots at one end and scattered from them at the other."""
    bodies = [torch.tensor(list(buffer), dtype=torch.uint8) for buffer in buffers]
    taken, copies = [torch.zeros_like(body) for body in bodies], SlotCopies()
    sent, wanted = list(protocol.chunks(bodies, size)), list(protocol.chunks(taken, size))
    sizes = [sum(map(len, chunk)) for chunk in sent]
    assert all(each == size for each in sizes[:-1])
    assert all(sizes)
    for chunk, place in zip(sent, wanted, strict=True):
        slot = torch.zeros(size, dtype=torch.uint8)
        assert copies.gather(chunk, slot) == sum(map(len, place))
        assert copies.scatter(slot, place) is None
    assert all(map(torch.equal, taken, bodies))


@pytest.mark.parametrize("size", [1, 300])
def test_a_landing_arrives_as_it_was_sent(size: int) -> None:
    landing = bytes(size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(protocol.encode_landing(landing) + protocol.TAKEN)
        assert protocol.receive_landing(theirs) == landing


@pytest.mark.parametrize("size", [0, protocol.MAX_LANDING + 1])
def test_a_landing_of_no_sensible_size_is_refused(size: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(protocol.LENGTH.pack(size))
        with pytest.raises(wire.WireError, match=f"a landing of {size} bytes"):
            protocol.receive_landing(theirs)
