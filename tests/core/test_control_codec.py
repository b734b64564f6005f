"""Encoding of control channel messages: whole plans arrive, broken messages are refused."""

import pytest

from bamboo_core.control import codec
from bamboo_core.control.protocol import SendPlan, Stop
from world import World


def test_a_plan_is_encoded_once_for_all_workers_and_arrives_whole() -> None:
    world = World(2, 3, 1)
    world.settle()
    frames, message = codec.Frames(), SendPlan(plan=world.plans[-1])
    frame = frames.of(message)
    assert isinstance(frame, bytes)
    assert len(frame) < len(codec.encode(message)) / 2
    assert codec.decode_from_coordinator(frame) == message
    assert frames.of(message) is frame


def test_a_frame_that_is_cut_or_grows_without_end_is_refused() -> None:
    frame = codec.frame_of(Stop(reason="X" * 3000))
    assert isinstance(frame, bytes)
    assert len(frame) < 100
    endless = codec.frame_of(Stop(reason="X" * (codec.MAX_MESSAGE_BYTES + 1)))
    assert isinstance(endless, bytes)
    assert len(endless) < codec.MAX_MESSAGE_BYTES
    for bad in (frame[:-1], frame + b"x", b"\x78", b"\x78\x9cnothing", endless):
        with pytest.raises(ValueError, match="malformed message"):
            codec.decode_from_coordinator(bad)
