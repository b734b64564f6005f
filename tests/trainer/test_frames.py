"""Frames in a wrong form are refused: they end no worker and change nothing."""

import logging
import math
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_core.coordinator.events import Outcome
from bamboo_trainer import frames
from bamboo_trainer.frames import Address, Frame, FrameKind, RefusedFrame
from bamboo_trainer.transport.base import Arrived
from manifest_kit import bamboojob, training
from memory_transport import travelled
from training_job import Job

COMMIT = {"norm": 1.0, "loss": 0.5, "microbatches": 2, "generation": 0, "epoch": 1}
MARK = {"number": 1, "id": "ab12", "writers": [["w0"], ["w1", "w0"]]}
READY = {"cell": [0, 1], "squared_norm": [2.0], "losses": {0: 0.5}}
SUMS = {"weights": {0: 3.0}, "added": {"balance": [0.5]}, "metrics": {"accuracy": [[1.0], [3.0]]}}
ANNOUNCE = {"version": 0, "secured": 1}
CUT = {"step": 3, "id": "ab12"}
SPOT = {
    "inputs": 1,
    "taken": None,
    "given": {"weight": 2.0},
    "data": 8,
    "layers": [2**64 - 1, 0],
    "outputs": 5,
    "gradients": 6,
    "parameters": 7,
}
LAYER = {
    "tensors": ["parameter:0.weight"],
    "scalars": {"state:0.weight:step": 3},
    "names": {},
    "common": {"loss_scale": {"scale": 2.0, "good": 1}},
}
FILLING = {"layers": 1, "generation": 0, "commits": [[2, COMMIT]]}
FLAT = (torch.ones(3),)
BYTES = torch.zeros(12, dtype=torch.uint8)


def frame(kind: FrameKind, payload: Any = None, tensors: tuple[torch.Tensor, ...] = ()) -> Frame:
    return Frame(address=Address(kind, 0, 1, 3), epoch=1, tensors=tensors, payload=payload)


PARTIAL = {
    "losses": {3: 0.5},
    "weights": {3: 2.0},
    "metrics": {3: {"accuracy": [1.0, 2.0]}},
    "added": {3: [["balance", 0.25]]},
}
RIGHT = {
    FrameKind.ACTIVATION: frame(FrameKind.ACTIVATION, {"gradients": [False]}, (torch.ones(2, 2),)),
    FrameKind.GRADIENT: frame(FrameKind.GRADIENT, {"again": True}),
    FrameKind.CONTRIBUTION: frame(FrameKind.CONTRIBUTION, None, FLAT),
    FrameKind.RESULT: frame(FrameKind.RESULT, {"again": True}, FLAT),
    FrameKind.TIED: frame(FrameKind.TIED, None, FLAT * 2),
    FrameKind.READY: frame(FrameKind.READY, READY | SUMS),
    FrameKind.COMMIT: frame(FrameKind.COMMIT, {**COMMIT, "checkpoint": MARK, "metrics": {"accuracy": 0.5}}),
    FrameKind.SYNC: frame(FrameKind.SYNC, [[2, COMMIT]], FLAT),
    FrameKind.ANNOUNCE: frame(FrameKind.ANNOUNCE, ANNOUNCE),
    FrameKind.HEARD: frame(FrameKind.HEARD, []),
    FrameKind.ASK: frame(FrameKind.ASK),
    FrameKind.LOGGED: frame(FrameKind.LOGGED, [[[0, 1], 3]]),
    FrameKind.LOGGED_BULK: frame(FrameKind.LOGGED_BULK, []),
    FrameKind.LOGGED_STATE: frame(FrameKind.LOGGED_STATE, []),
    FrameKind.SPOT_CHECK: frame(FrameKind.SPOT_CHECK, SPOT, (torch.ones(2, 2), torch.ones(3))),
    FrameKind.LAYERS_WANTED: frame(FrameKind.LAYERS_WANTED, {"checkpoint": CUT, "layers": [0, 3]}),
    FrameKind.LAYER: frame(FrameKind.LAYER, {**LAYER, "filling": FILLING}, (torch.ones(2, 2),)),
    FrameKind.LAYERS_LACKED: frame(FrameKind.LAYERS_LACKED, {"checkpoint": CUT, "layers": [3]}),
    FrameKind.HISTORY: frame(FrameKind.HISTORY, [[1, COMMIT]]),
    FrameKind.PARTIAL_SUM: frame(FrameKind.PARTIAL_SUM, PARTIAL, FLAT),
    FrameKind.KEPT_SUM: frame(FrameKind.KEPT_SUM, PARTIAL, FLAT),
    FrameKind.KEPT_ALL: frame(FrameKind.KEPT_ALL),
    FrameKind.REPEAT: frame(FrameKind.REPEAT),
    FrameKind.SUMMED: frame(FrameKind.SUMMED),
    FrameKind.EVALUATIONS: frame(FrameKind.EVALUATIONS, {2: {"loss": 0.5}}),
}


@pytest.mark.parametrize("kind", FrameKind)
def test_a_frame_of_each_kind_is_read(kind: FrameKind) -> None:
    read = frames.read(RIGHT[kind])
    assert frames.read(read) is read or frames.read(read) == read
    assert frames.read(travelled(read)).payload == read.payload


WRONG = {
    "no partial sum": frame(FrameKind.PARTIAL_SUM, PARTIAL, ()),
    "a checkpoint with a path": frame(FrameKind.COMMIT, {**COMMIT, "checkpoint": {**MARK, "id": "../x"}}),
    "a spot check of inputs that are not there": frame(FrameKind.SPOT_CHECK, SPOT, ()),
    "a spot check's sums": frame(FrameKind.SPOT_CHECK, {**SPOT, "layers": [-1]}, FLAT),
    "no activation": frame(FrameKind.ACTIVATION),
    "an activation's meta": frame(FrameKind.ACTIVATION, {"agains": True}, FLAT),
    "a contribution of bytes": frame(FrameKind.CONTRIBUTION, None, (BYTES,)),
    "two gradients": frame(FrameKind.SYNC, [], FLAT * 2),
    "a square contribution": frame(FrameKind.RESULT, None, (torch.ones(2, 2),)),
    "a gradient of integers": frame(FrameKind.SYNC, [], (torch.ones(3, dtype=torch.int64),)),
    "more than ready": frame(FrameKind.READY, {**READY, "more": 1}),
    "a metric of one sum": frame(FrameKind.READY, {**READY, "metrics": {"a": [[1.0]]}}),
    "half a commit": frame(FrameKind.COMMIT, {"norm": 1.0}),
    "a mark of the past": frame(FrameKind.COMMIT, {**COMMIT, "history": {"attempt": -1, "written": 0, "at": 0.0}}),
    "a layer without a name": frame(FrameKind.LAYER, {**LAYER, "tensors": [], "filling": FILLING}, FLAT),
    "a layer of no state": frame(FrameKind.LAYER, LAYER, FLAT),
    "a layer that nobody asked for": frame(FrameKind.LAYER, {**LAYER, "checkpoint": CUT}, FLAT),
    "a layer of two states": frame(FrameKind.LAYER, {**LAYER, "checkpoint": CUT, "filling": FILLING}, FLAT),
    "one of no layers": frame(FrameKind.LAYER, {**LAYER, "filling": {**FILLING, "layers": 0}}, FLAT),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_frame_in_a_wrong_form_is_refused(name: str) -> None:
    with pytest.raises(RefusedFrame, match=r"."):
        frames.read(WRONG[name])


NUMBERS = st.integers(-3, 6) | st.sampled_from([-(2**31), 2**31 - 1])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from([0.5, math.inf, math.nan]) | st.text(max_size=4)
ANY = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=6
)
TENSORS = st.builds(
    torch.zeros,
    st.sampled_from([(), (0,), (3,), (16, 2), (48,)]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.int64, torch.bool]),
)
ADDRESSES = st.builds(
    Address, st.sampled_from(FrameKind), st.integers(-1, 1), st.integers(-1, 2), NUMBERS, st.integers(-1, 4), NUMBERS
)


def like(value: Any) -> st.SearchStrategy[Any]:
    """Return a strategy that draws the value, a variant with other or missing parts, or an unrelated value."""
    parts = st.nothing()
    if isinstance(value, dict):
        parts = st.fixed_dictionaries({}, optional={key: like(part) for key, part in value.items()})
    elif isinstance(value, list):
        parts = st.tuples(*map(like, value)).map(list)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        parts = NUMBERS
    return st.just(value) | parts | ANY


@st.composite
def payloads_frames(draw: st.DrawFn) -> Frame:
    """Draw a frame that is valid, or has wrong values in any of its fields."""
    commit = frame(FrameKind.COMMIT, {**COMMIT, "checkpoint": MARK})
    right, numbers = draw(st.sampled_from([commit, *RIGHT.values()])), st.integers(0, 2) | NUMBERS
    address = draw(ADDRESSES)
    return Frame(
        address=draw(st.just(address._replace(kind=right.address.kind)) | st.just(address)),
        epoch=draw(numbers),
        origin=draw(numbers),
        tensors=draw(st.just(right.tensors) | st.lists(TENSORS, max_size=2).map(tuple)),
        payload=draw(like(right.payload)),
    )


class Paused(Exception):
    """An exception that stops a job at a step."""


def stopped(document: dict[str, Any], until: int) -> Job:
    """Return a job that is stopped in the middle of step `until`, or with -1 a job that has ended."""
    paused: list[int] = []

    def decide(job: Job) -> None:
        if job.state.step == until and not paused:
            paused.append(job.turns)
            raise Paused

    made = Job(document, decide=decide)
    with suppress(Paused):
        made.run()
    return made


def job(until: int) -> Job:
    config = {"width": 16, "blocks": 1, "samples": 8}
    document = bamboojob(
        task={"entrypoint": "bamboo_trainer.models.mlp:build", "config": config},
        training=training(3, 4, 2),
        topology={"stages": 2},
        redundancy={"mode": "Replicas"},
    )
    return stopped(document, until)


@cache
def undisturbed() -> Job:
    return job(until=-1)


def readable(frame: Frame) -> bool:
    try:
        frames.read(frame)
    except RefusedFrame:
        return False
    return True


SLOW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@SLOW
@given(st.lists(payloads_frames().filter(lambda frame: not readable(frame)), min_size=1, max_size=12))
def test_what_is_refused_changes_nothing(said: list[Frame]) -> None:
    told = job(until=1)
    for name, node in told.nodes.items():
        peer = next(other for other in told.nodes if other != name)
        for frame in said:
            node.engine.handle(Arrived(peer, frame))
    told.run()
    assert told.outcome is Outcome.COMPLETE
    assert told.digests == undisturbed().digests
    assert told.state.progress.losses == undisturbed().state.progress.losses


def test_what_is_refused_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told = job(until=1)
    engine = told.nodes["w0"].engine
    with caplog.at_level(logging.WARNING):
        engine.handle(Arrived("w1", WRONG["half a commit"]))
    (record,) = caplog.records
    assert record.getMessage().startswith("refused a COMMIT of w1: payload: Object missing required field `loss`")
    assert engine.step == 1
