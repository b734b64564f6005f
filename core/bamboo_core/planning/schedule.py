"""The schedule as data: the instructions of a cell in a step, in order. The engine runs them, the simulator times them.

The order inside a cell is fixed, as it fixes the order of floating-point sums; cells wait only for tensors. In 1F1B of
PipeDream-Flush (Narayanan et al., 2021) the warm-ups of two neighbours differ by one forward, so two microbatches share
one round trip to the next stage, and each costs one transfer's time. Here warm-ups differ by two ("eager 1F1B", Zhuang
et al., On Optimizing the Communication of Model Parallelism, 2023), so three microbatches share a round trip while
others are computed: a transfer that takes at most half as long as a forward and a backward costs nothing.

ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024) has the same order of forwards and backwards, but computes the
weights' gradients, which no other stage waits for, later. A stage then has work at the end of the step, while the
stages before it still run their backwards, which all begin earlier.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, assert_never

from bamboo_core.job.spec import PipelineSchedule, TopologySpec
from bamboo_core.planning.cell_portions import Range
from bamboo_core.planning.gradient_groups import SumNode
from bamboo_core.planning.plan import Cell, Layout


@dataclass(frozen=True, slots=True)
class Forward:
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardInput(Backward):
    """A backward for the inputs' gradients only, which the stage before awaits; `BackwardWeight` computes the rest."""


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The instruction to compute the weight gradients that a microbatch's backward has postponed."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardRest:
    """The backward of one more bucket of layers, if a backward runs bucket by bucket; `Backward` runs the first one."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A forward of one batch of evaluation data."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class SendPartialSum:
    """An instruction to send the gradient sum of a portion of a cell's microbatches to the cell's owner."""

    portion: Range


@dataclass(frozen=True, slots=True)
class AddPartialSums:
    """An instruction to add up the portions' gradient sums; the result equals the sum of an undivided cell."""

    portions: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class ScatterGradients:
    """An instruction to send one bucket of the sum over `node`'s groups: to each other owner of the stage its chunk."""

    node: SumNode
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """An instruction to sum this cell's chunk of a bucket over the pipelines, in a fixed order, and send the sum to the
    stage's other owners.
    """

    bucket: int = 0


@dataclass(frozen=True, slots=True)
class GatherGradients:
    """An instruction to assemble a stage's gradients from the reduced chunks of all buckets."""

    buckets: int = 1


@dataclass(frozen=True, slots=True)
class ExchangeTied:
    """An instruction to send the gradients of tied parameters to the other stages that hold them."""


@dataclass(frozen=True, slots=True)
class SumTied:
    """An instruction to add the other stages' gradients of tied parameters, in stage order."""


@dataclass(frozen=True, slots=True)
class SyncReplicas:
    """An instruction to send the final gradients to the replicas."""


@dataclass(frozen=True, slots=True)
class ReportReady:
    """An instruction to report to the root that this cell has finished the step. It waits until replicas in sync, and
    some new ones, hold the state before the step. If workers that repeat the step might lack tensors, it also waits
    until the replicas in sync can reach the state after the step.
    """


AHEAD: Final = 2  # forwards by which the warm-ups of neighbouring stages differ
Computed = Forward | Backward | BackwardWeight | BackwardRest
Instruction = (
    Evaluate
    | Computed
    | SendPartialSum
    | AddPartialSums
    | ScatterGradients
    | ReduceGradients
    | GatherGradients
    | ExchangeTied
    | SumTied
    | SyncReplicas
    | ReportReady
)


def one_f_one_b(stage: int, stages: int, microbatches: Sequence[int]) -> list[Forward | Backward]:
    """Return a stage's program in 1F1B order: warm-up forwards, then backward and forward in turn, then the remaining
    backwards.

    The first stage keeps the activations of at most `2 * stages - 1` microbatches, the last stage of one.
    """
    after = stages - 1 - stage
    warmup = min(len(microbatches), 1 + after * AHEAD)
    program: list[Forward | Backward] = [Forward(m) for m in microbatches[:warmup]]
    for done, m in enumerate(microbatches[warmup:]):
        program += [Backward(microbatches[done]), Forward(m)]
    program += [Backward(m) for m in microbatches[len(microbatches) - warmup :]]
    return program


def zb_h1(stage: int, stages: int, microbatches: Sequence[int]) -> list[Computed]:
    """Return a stage's program in ZB-H1 order: as 1F1B, but with the weight gradients of stage s delayed by 2 * s
    microbatches.

    With fewer than 2 * (stages - 1) microbatches the delay is s, so that fewer weight gradients are left for the end.

    Every stage has at most `2 * stages - 1` microbatches in flight, including microbatches that only wait for their
    weight gradients, as many as the first stage has in 1F1B. The first stage postpones nothing.
    """
    ahead = AHEAD if len(microbatches) >= (stages - 1) * AHEAD else 1
    delay = stage * ahead
    program: list[Computed] = []
    done = 0
    for instruction in one_f_one_b(stage, stages, microbatches):
        if stage == 0 or isinstance(instruction, Forward):
            program.append(instruction)
            continue
        program.append(BackwardInput(instruction.microbatch))
        done += 1
        if done > delay:
            program.append(BackwardWeight(microbatches[done - delay - 1]))
    if stage > 0:
        program += [BackwardWeight(m) for m in microbatches[max(0, done - delay) :]]
    return program


def with_late_weights(program: Sequence[Computed]) -> list[Computed]:
    """Return the program with the weight gradients of each Backward computed after the next one's input gradients.

    This is for a cell that is taken over in the middle of a step: other workers wait for its repeated tensors, but not
    for weight gradients. One more microbatch is in flight, with its weight gradients.
    """
    reordered: list[Computed] = []
    waiting: list[Computed] = []
    for instruction in program:
        if type(instruction) is not Backward:
            reordered.append(instruction)
            continue
        reordered += [BackwardInput(instruction.microbatch), *waiting]
        waiting = [BackwardWeight(instruction.microbatch)]
    return [*reordered, *waiting]


_ORDERS: Final[dict[PipelineSchedule, Callable[[int, int, Sequence[int]], Sequence[Computed]]]] = {
    PipelineSchedule.ONE_F_ONE_B: one_f_one_b,
    PipelineSchedule.ZB_H1: zb_h1,
}


def postpones_weights(schedule: PipelineSchedule) -> bool:
    """Return whether the schedule computes weight gradients later than input gradients, in bubbles."""
    match schedule:
        case PipelineSchedule.ONE_F_ONE_B:
            return False
        case PipelineSchedule.ZB_H1:
            return True
        case _:
            assert_never(schedule)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """The order in which each stage runs the forwards and backwards of a step."""

    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    late_weights: bool = False  # see `with_late_weights`

    @classmethod
    def of(cls, topology: TopologySpec) -> Self:
        """Return the order with which a job of that topology begins."""
        return cls(topology.first_schedule)

    def taken_over(self) -> Self:
        """Return the order for a step of a cell that another worker has taken over."""
        return replace(self, late_weights=True)

    def program(self, stage: int, stages: int, microbatches: Sequence[int]) -> list[Computed]:
        instructions: list[Computed] = [*_ORDERS[self.schedule](stage, stages, microbatches)]
        return with_late_weights(instructions) if self._postpones(stages) else instructions

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        """Return the most microbatches whose activations a stage keeps at once."""
        match self.schedule:
            case PipelineSchedule.ONE_F_ONE_B:
                later, postponed = stages - 1 - stage, True
            case PipelineSchedule.ZB_H1:
                later, postponed = stages - 1, stage == 0
            case schedule:
                assert_never(schedule)
        return min(microbatches, 1 + later * AHEAD + (postponed and self._postpones(stages)))

    def _postpones(self, stages: int) -> bool:
        """Return whether `with_late_weights` applies: not with one stage, since no stage waits for its backward."""
        return self.late_weights and stages > 1


def evaluation(cell: Cell, layout: Layout, batches: int) -> list[Instruction]:
    """Return the instructions with which a cell evaluates its pipeline's share of `batches` batches. They run first in
    a step, on the state that the previous step left.
    """
    d, pipelines = cell.pipeline, layout.pipelines
    return [Evaluate(m) for m in range(batches * d // pipelines, batches * (d + 1) // pipelines)]


def portion_program(
    stage: int, stages: int, portion: Range, order: StageOrder, left: int, again: Collection[int] = ()
) -> list[Computed]:
    """Return a worker's program for a portion of a cell's microbatches.

    left: the first microbatch left to run. again: earlier microbatches that are repeated for the neighbouring stages,
    though their gradients are already summed. The instructions keep the order of the whole cell's program, so stages
    cannot deadlock.
    """
    whole = order.taken_over().program(stage, stages, range(min((left, *again)), portion[1]))
    return [i for i in whole if i.microbatch >= left or (i.microbatch in again and not isinstance(i, BackwardWeight))]


def with_early_sums(steps: Sequence[Instruction], sums: Mapping[int, SumNode], buckets: int) -> list[Instruction]:
    """Insert instructions that send finished sums into a cell's instructions. A sum is sent right after the last
    instruction of its last microbatch, while later microbatches are computed; in a cell with portions, at the end.

    sums: the nodes of the sums, by their last microbatch.
    """
    last = {getattr(one, "microbatch", None): place for place, one in enumerate(steps)}
    sent: defaultdict[int, list[Instruction]] = defaultdict(list)
    for microbatch, node in sums.items():
        sent[last.get(microbatch, len(steps) - 1)] += (ScatterGradients(node, bucket) for bucket in range(buckets))
    return [one for place, step in enumerate(steps) for one in (step, *sent[place])]


def reduction(last: Instruction, node: SumNode, buckets: int) -> list[Instruction]:
    """Return the instructions that sum gradients over the pipelines, after a step's forwards and backwards.

    A bucket of layers is sent as soon as it is final. If `last` is a whole Backward, it runs bucket by bucket: while
    one bucket is computed, the previous one is sent, and the one before that is summed. last: the instruction before
    these. node: the cell's last sum; its earlier ones have been sent (`with_early_sums`).
    """
    rest = [BackwardRest(last.microbatch)] if type(last) is Backward else []
    steps: list[Instruction] = [ScatterGradients(node)]
    for bucket in range(1, buckets):
        steps += [*rest, ScatterGradients(node, bucket), ReduceGradients(bucket - 1)]
    return [*steps, ReduceGradients(buckets - 1), GatherGradients(buckets)]


def program(
    cell: Cell,
    stages: int,
    layout: Layout,
    tied: bool,
    order: StageOrder,
    portions: Sequence[Range] = (),
    buckets: int = 1,
) -> list[Instruction]:
    """Return a cell's instructions for a whole step, without evaluation. tied: the stage has parameters that other
    stages hold too. portions: the microbatches of each worker that shares the cell, if any; this program then begins by
    adding the sums of their `portion_program`s. buckets: number of buckets of the stage's gradients.
    """
    steps: list[Instruction] = [AddPartialSums(tuple(portions))]
    if not portions:
        steps = [*order.program(cell.stage, stages, layout.split[cell.pipeline])]
    if layout.pipelines > 1:
        *early, node = layout.sums(cell.pipeline)
        steps = with_early_sums(steps, {layout.bounds[one.end] - 1: one for one in early}, buckets)
        steps += reduction(steps[-1], node, buckets)
    if tied:
        steps += [ExchangeTied(), SumTied()]
    return [*steps, SyncReplicas(), ReportReady()]
