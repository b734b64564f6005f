"""The schedule as data: what a cell does in a step, and in which order. The engine runs it, the simulator times it.

The order inside a cell is fixed, because it fixes the order of floating-point sums; between cells everything is free
and driven by arrivals. 1F1B as published by PipeDream-Flush (Narayanan et al., 2021). There two neighbours' warm-ups
differ by one forward, so two microbatches share one way to the next stage and back, and each one costs the time of a
way. If they differ by two ("eager 1F1B", Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023),
three do, while others are computed: a way of up to half a forward and backward costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bamboo.planning.plan import Cell, Layout
from bamboo.planning.portions import Range


@dataclass(frozen=True, slots=True)
class Forward:
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    microbatch: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A forward for evaluation only, of that batch of the evaluation's data."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class SendPartialSum:
    """Give a cell's owner what a portion of its microbatches came to."""

    portion: Range


@dataclass(frozen=True, slots=True)
class AddPartialSums:
    """Put together what the portions of this cell came to: all that its forwards and backwards would have come to."""

    portions: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class ScatterGradients:
    """Send each pipeline's owner of this stage the chunk that it reduces."""


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Sum this cell's chunk over the pipelines, in pipeline order, and send the sum to the others."""


@dataclass(frozen=True, slots=True)
class GatherGradients:
    """Put the reduced chunks together."""


@dataclass(frozen=True, slots=True)
class ExchangeTied:
    """Send the gradients of parameters that other stages hold too."""


@dataclass(frozen=True, slots=True)
class SumTied:
    """Add the other stages' gradients of tied parameters, in stage order."""


@dataclass(frozen=True, slots=True)
class SyncReplicas:
    """Send the final gradients to the replicas."""


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Tell the root that this cell has finished the step; waits until its replicas hold the step's first version."""


Instruction = (
    Evaluate | Forward | Backward | SendPartialSum | AddPartialSums | ScatterGradients | ReduceGradients
    | GatherGradients | ExchangeTied | SumTied | SyncReplicas | ReportReady
)  # fmt: skip


def one_f_one_b(stage: int, stages: int, microbatches: Sequence[int], lookahead: int = 0) -> list[Forward | Backward]:
    """Warm-up forwards, then backward and forward in turn, then the remaining backwards.

    lookahead: by how many forwards more than in plain 1F1B each stage is ahead of the next one; 0 is plain, 1 eager.
    The first stage keeps the activations of `stages + lookahead * (stages - 1)` microbatches, the last one of one.
    """
    after = stages - 1 - stage
    warmup = min(len(microbatches), 1 + after * (1 + lookahead))
    program: list[Forward | Backward] = [Forward(m) for m in microbatches[:warmup]]
    for done, m in enumerate(microbatches[warmup:]):
        program += [Backward(microbatches[done]), Forward(m)]
    program += [Backward(m) for m in microbatches[len(microbatches) - warmup :]]
    return program


def evaluation(cell: Cell, layout: Layout, batches: int) -> list[Instruction]:
    """A cell's part in an evaluation of so many batches: of a state that it has just come to, before the step."""
    d, pipelines = cell.pipeline, layout.pipelines
    return [Evaluate(m) for m in range(batches * d // pipelines, batches * (d + 1) // pipelines)]


def last_program() -> list[Instruction]:
    """After the last step a cell only says what its evaluation of the final state came to."""
    return [ReportReady()]


def portion_program(portion: Range) -> list[Instruction]:
    """What is run of a cell of a pipeline of one stage by one of those that share it."""
    return [*one_f_one_b(0, 1, range(*portion)), SendPartialSum(portion)]


def program(
    cell: Cell, stages: int, layout: Layout, tied: bool, lookahead: int, portions: Sequence[Range] = ()
) -> list[Instruction]:
    """The whole step of a cell, without an evaluation before it. portions: if others share its microbatches."""
    steps: list[Instruction] = [AddPartialSums(tuple(portions))]
    if not portions:
        steps = [*one_f_one_b(cell.stage, stages, layout.split[cell.pipeline], lookahead)]
    if layout.pipelines > 1:
        steps += [ScatterGradients(), ReduceGradients(), GatherGradients()]
    if tied:
        steps += [ExchangeTied(), SumTied()]
    return [*steps, SyncReplicas(), ReportReady()]
