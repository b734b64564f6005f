"""What the message log holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.routing.message_log import MessageLog
from stage_kit import storages

TENSORS = [torch.zeros(n) for n in (1, 8, 64)]


actions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(st.integers(0, 2), max_size=2)))


@given(actions)
def test_the_log_holds_the_newest_frames_of_two_steps(what: list[tuple[int, int, list[int]]]) -> None:
    log, kept = MessageLog(), dict[Address, list[int]]()
    for step, place, parts in what:
        if place == 2:
            log.committed(step)
            kept = {address: held for address, held in kept.items() if address.step >= step}
            continue
        address = Address(FrameKind.ACTIVATION, 0, place, step)
        kept[address] = parts
        log.add(Frame(address=address, epoch=1, tensors=tuple(TENSORS[i][:1] for i in parts)))
    expected = storages([TENSORS[i] for held in kept.values() for i in held])
    assert storages([tensor for frame in log.frames() for tensor in frame.tensors]) == expected
