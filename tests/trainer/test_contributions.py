"""What microbatches contribute to running buffers, as it is kept, sent and folded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_trainer.frames.payloads import Contributed, Contribution
from bamboo_trainer.frames.tensors import DTYPES
from bamboo_trainer.stage.contributions import Recorded, RunningBuffers, packed, unpacked
from bamboo_trainer.tasks.capture import Capture, capturing
from bamboo_trainer.tasks.task_errors import TaskError

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


def layers() -> dict[int, nn.Module]:
    torch.manual_seed(1)
    return {4: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), 5: nn.Tanh()}


def recorded(layer: nn.Module, running: RunningBuffers, seed: int) -> Recorded:
    capture = Capture()
    torch.manual_seed(seed)
    with capturing(capture):
        layer(torch.randn(6, 3))
    return running.record(capture.contributed)


def test_folded_buffers_are_those_of_plain_torch() -> None:
    own, plain = layers(), layers()
    running = RunningBuffers(own)
    assert running
    assert {layer for layer, _ in running.places()} == {4}
    contributed = {m: recorded(own[4], running, m) for m in range(3)}
    before = own[4][1].running_mean.clone()  # type: ignore[index]
    (values,) = running.folded(contributed, 3)
    assert torch.equal(own[4][1].running_mean, before), "a forward leaves them as they are"  # type: ignore[index]
    running.set(values)
    for m in range(3):
        torch.manual_seed(m)
        plain[4](torch.randn(6, 3))
    for name, buffer in plain[4].named_buffers():
        torch.testing.assert_close(dict(own[4].named_buffers())[name], buffer)


def test_what_somebody_else_tells_has_to_fit() -> None:
    own = layers()
    running = RunningBuffers(own)
    running.check(Contributed(microbatches={0: list(recorded(own[4], running, 0).contributions)}))
    with pytest.raises(ValueError, match="module 7 of 1"):
        running.check(Contributed(microbatches={0: [Contribution(module=7, tensors=[])]}))
    with pytest.raises(ValueError, match="expected"):
        running.check(Contributed(microbatches={0: [Contribution(module=0, tensors=[(FLOAT, (9,))])]}))


def test_a_stranger_has_no_part_in_it() -> None:
    running = RunningBuffers(layers())
    with pytest.raises(TaskError, match="let the layer have it as an attribute"):
        running.record([(nn.BatchNorm1d(2), (torch.zeros(2),))])


def test_a_stage_without_running_buffers_folds_nothing() -> None:
    running = RunningBuffers({0: nn.Linear(2, 2)})
    assert not running
    assert (running.size, running.folded({}, 0)) == (0, ())
