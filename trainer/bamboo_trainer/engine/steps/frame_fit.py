"""Checks that a peer's share of a stage's gradients fits the cell's step.

`payloads` checks what a frame's kind allows. This module knows the stage and the layout: how many pieces, how long they
are, and of which microbatches. A misfit would fail in the middle of a reduction.
"""

import torch

from bamboo_core.planning.gradient_groups import nodes_of, share_of
from bamboo_core.planning.plan import Layout
from bamboo_trainer.frames.frame import Frame, FrameKind
from bamboo_trainer.frames.payloads import RefusedFrame
from bamboo_trainer.stage.state.final_gradients import FinalGradients


def chunk(bucket: slice, parts: int, index: int) -> slice:
    """Return the index-th of `parts` nearly equal, contiguous chunks of these elements."""
    size = bucket.stop - bucket.start
    return slice(bucket.start + size * index // parts, bucket.start + size * (index + 1) // parts)


def check_fit(frame: Frame, form: FinalGradients, layout: Layout) -> None:
    """Raise RefusedFrame for a misfit. frame: for a cell whose stage has gradients of this form, with this layout."""
    match frame.address.kind:
        case FrameKind.CONTRIBUTION:
            _check_contribution(frame, form, layout)
        case FrameKind.PARTIAL_SUM:
            check_sum(frame, form, layout)
        case FrameKind.RESULT:
            source = _pipeline(frame, layout)
            length = _length(chunk(_bucket(frame, form), layout.pipelines, source))
            _check_sizes(frame.tensors, [length])
        case FrameKind.TIED:
            other = frame.address.part
            sizes = [segment.size for segment in form.tied for use in segment.uses if use.stage == other]
            _check_sizes(frame.tensors, sizes)


def _check_contribution(frame: Frame, form: FinalGradients, layout: Layout) -> None:
    source, own = _pipeline(frame, layout), frame.address.pipeline
    nodes = nodes_of(layout.shares[source], len(layout.bounds) - 1)
    length = _length(chunk(_bucket(frame, form), layout.pipelines, own))
    _check_sizes(frame.tensors, [length] * len(nodes))


def check_sum(frame: Frame, form: FinalGradients | None, layout: Layout) -> None:
    """Raise RefusedFrame for a misfit. frame: the sum of some groups of a cell. form: None without the stage."""
    microbatches = range(frame.address.microbatch, frame.address.part)
    if not set(microbatches) <= {m for part in layout.split[frame.address.pipeline :][:1] for m in part}:
        raise RefusedFrame(f"a portion of microbatches {microbatches.start} to {microbatches.stop - 1}")
    try:
        nodes = nodes_of(share_of(microbatches, layout.bounds), len(layout.bounds) - 1)
    except ValueError as error:
        raise RefusedFrame(str(error)) from error
    losses = sorted(frame.payload.losses)
    if len(frame.tensors) != len(nodes) or losses not in ([], list(microbatches)):
        raise RefusedFrame(f"{len(frame.tensors)} tensors and losses of {len(losses)} microbatches")
    if form is not None:
        _check_sizes(frame.tensors, [form.gradient_size] * len(nodes))


def _pipeline(frame: Frame, layout: Layout) -> int:
    """Return the pipeline whose share it is."""
    source = frame.address.part
    if not 0 <= source < layout.pipelines:
        raise RefusedFrame(f"a share of pipeline {source}, expected one of {layout.pipelines}")
    return source


def _bucket(frame: Frame, form: FinalGradients) -> slice:
    """Return the bucket that its elements belong to."""
    number = frame.address.microbatch
    if not 0 <= number < len(form.buckets):
        raise RefusedFrame(f"a share of bucket {number}, expected one of {len(form.buckets)}")
    return form.buckets[number]


def _check_sizes(tensors: tuple[torch.Tensor, ...], expected: list[int]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    if sizes != expected:
        raise RefusedFrame(f"pieces of {sizes[:8]} elements, expected {expected[:8]}")


def _length(piece: slice) -> int:
    length: int = piece.stop - piece.start
    return length
