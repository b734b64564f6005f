"""Whether a peer's share of a stage's gradients fits the step that it is for."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.plan import Layout
from bamboo_trainer.engine.steps.frame_fit import check_fit, chunk
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import Contributed, RefusedFrame
from bamboo_trainer.stage.stage import Stage, build_stage
from stage_kit import CONFIG, small_task

LAYOUT = Layout(generation=1, split=((0, 1), (2,)), groups=(0, 1, 2, 3))


@pytest.fixture(scope="module")
def stage() -> Stage:
    return build_stage(small_task(), 0, [(0, 3)], CONFIG)


@given(st.integers(0, 50), st.integers(0, 1000), st.integers(1, 20))
def test_chunks_are_a_partition_of_nearly_equal_parts(start: int, size: int, parts: int) -> None:
    found = [chunk(slice(start, start + size), parts, i) for i in range(parts)]
    assert [i for piece in found for i in range(start + size)[piece]] == list(range(start, start + size))
    lengths = [piece.stop - piece.start for piece in found]
    assert max(lengths) - min(lengths) <= 1


def share(stage: Stage, *, source: int = 0, pieces: int = 1, wrong: int = 0, said: Any = None, **more: Any) -> Frame:
    """Of pipeline `source`, for pipeline 1. Its microbatches 0 and 1 of three groups are one node of the sums' tree."""
    part = chunk(slice(0, stage.values.final.gradient_size), 2, 1)
    tensors = tuple(torch.zeros(part.stop - part.start + wrong) for _ in range(pieces))
    microbatches = {m: [] for m in LAYOUT.split[source]} if said is None else said
    address = Address(FrameKind.CONTRIBUTION, 1, 0, 0, more.get("bucket", 0), part=more.get("part", source))
    return Frame(address=address, epoch=1, tensors=tensors, payload=Contributed(microbatches=microbatches))


def nodes(stage: Stage, source: int) -> int:
    """How many pieces a pipeline's share has."""
    for pieces in range(1, 4):
        try:
            check_fit(share(stage, source=source, pieces=pieces), stage.values.final, LAYOUT)
        except RefusedFrame:
            continue
        return pieces
    raise AssertionError("no number of pieces fits")


def test_a_share_has_a_piece_for_each_sum_that_the_tree_takes(stage: Stage) -> None:
    assert (nodes(stage, 0), nodes(stage, 1)) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"source": 1, "pieces": 3}, "expected 1 shares"),
        ({"source": 1, "wrong": 1}, "elements, expected"),
        ({"source": 1, "said": {0: []}}, r"microbatches \[0\], expected \[2\]"),
        ({"part": 2}, "a share of pipeline 2"),
        ({"part": -1}, "a share of pipeline -1"),
        ({"bucket": 1}, "a share of bucket 1, expected one of 1"),
    ],
)
def test_what_does_not_fit_is_refused(stage: Stage, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedFrame, match=said):
        check_fit(share(stage, **wrong), stage.values.final, LAYOUT)


def test_a_reduced_chunk_has_the_length_of_its_chunk(stage: Stage) -> None:
    def result(part: int, size: int) -> Frame:
        address = Address(FrameKind.RESULT, 1, 0, 0, part=part)
        return Frame(address=address, epoch=1, tensors=(torch.zeros(size),), payload=None)

    for part in range(2):
        piece = chunk(slice(0, stage.values.final.gradient_size), 2, part)
        check_fit(result(part, piece.stop - piece.start), stage.values.final, LAYOUT)
    with pytest.raises(RefusedFrame, match="pieces of"):
        check_fit(result(0, stage.values.final.gradient_size), stage.values.final, LAYOUT)


def test_kinds_that_nobody_reduces_are_not_looked_at(stage: Stage) -> None:
    frame = Frame(address=Address(FrameKind.ACTIVATION, 0, 0, 0), epoch=1, tensors=(torch.zeros(99),), payload=None)
    check_fit(frame, stage.values.final, LAYOUT)
