"""What microbatches contribute to running buffers, as it is kept, sent and folded."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.frames.payloads import Contribution
from bamboo_trainer.frames.tensors import DTYPES
from bamboo_trainer.stage.contributions import Recorded, packed, unpacked

FLOAT = next(name for name, dtype in DTYPES.items() if dtype is torch.float32)
SIZES = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4)  # microbatches, contributions: elements


@given(SIZES)
def test_what_is_packed_is_unpacked_with_the_same_bits(sizes: list[list[int]]) -> None:
    recorded = {}
    for m, counts in enumerate(sizes):
        values = [torch.arange(count, dtype=torch.float32) + m for count in counts]
        data = torch.cat([v.view(torch.uint8) for v in values]) if values else torch.empty(0, dtype=torch.uint8)
        told = tuple(Contribution(module=0, tensors=[(FLOAT, (count,))]) for count in counts)
        recorded[m] = Recorded(told, data)
    payload, tensors = packed(recorded)
    assert len(tensors) == any(one.data.numel() for one in recorded.values())
    found = unpacked(payload, tensors)
    assert list(found) == list(recorded)
    for m, one in recorded.items():
        assert found[m].contributions == one.contributions
        assert torch.equal(found[m].data, one.data)
