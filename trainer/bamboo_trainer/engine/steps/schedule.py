"""The frames that each instruction of the schedule (`bamboo_core.planning.schedule`) waits for."""

from collections.abc import Sequence

from bamboo_core.planning.plan import Cell, Layout
from bamboo_core.planning.schedule import (
    AddPartialSums,
    Backward,
    Evaluate,
    Forward,
    GatherGradients,
    Instruction,
    ReduceGradients,
    SumTied,
)
from bamboo_trainer.frames.frame import EVALUATED, Address, FrameKind


def needs(
    instruction: Instruction, cell: Cell, stages: int, layout: Layout, step: int, tied_stages: Sequence[int]
) -> tuple[Address, ...]:
    """Return the frames that must arrive before the instruction can run. tied_stages: the other stages of its ties."""
    d, s = cell
    match instruction:
        case Forward(m) if s > 0:
            return (Address(FrameKind.ACTIVATION, d, s, step, m),)
        case Evaluate(m) if s > 0:
            return (Address(FrameKind.ACTIVATION, d, s, step, m, EVALUATED),)
        case Backward(m) if s < stages - 1:
            return (Address(FrameKind.GRADIENT, d, s, step, m),)
        case AddPartialSums(portions):
            return tuple(Address(FrameKind.PARTIAL_SUM, d, s, step, first, end) for first, end in portions)
        case ReduceGradients(bucket):
            others = (e for e in range(layout.pipelines) if e != d)
            return tuple(Address(FrameKind.CONTRIBUTION, d, s, step, bucket, e) for e in others)
        case GatherGradients(buckets):
            chunks = ((b, e) for b in range(buckets) for e in range(layout.pipelines) if e != d)
            return tuple(Address(FrameKind.RESULT, d, s, step, b, e) for b, e in chunks)
        case SumTied():
            return tuple(Address(FrameKind.TIED, d, s, step, 0, t) for t in tied_stages)
        case _:
            return ()
