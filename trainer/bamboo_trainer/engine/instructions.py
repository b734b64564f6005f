"""The actions of instructions: methods of `Instructions`, chosen by the instruction's type."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bamboo_core.planning.gradient_groups import tree_sum
from bamboo_core.planning.plan import ROOT
from bamboo_core.planning.schedule import (
    AddPartialSums,
    Backward,
    BackwardInput,
    BackwardRest,
    BackwardWeight,
    Evaluate,
    ExchangeTied,
    Forward,
    GatherGradients,
    Instruction,
    ReduceGradients,
    ReportReady,
    ScatterGradients,
    SendPartialSum,
    SumTied,
    SyncReplicas,
)
from bamboo_trainer.commit.replication import Replicator
from bamboo_trainer.commit.step_report import step_report
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.determinism import SpotChecks
from bamboo_trainer.engine.portions import PortionSteps
from bamboo_trainer.engine.ports import EngineContext
from bamboo_trainer.frames import EVALUATED, Address, FrameFacts, FrameKind
from bamboo_trainer.stage.gradients import pieces
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Work, packed_work, resume


class Instructions:
    """The actions of instructions, which change their cell's step and may send frames. No state is kept here."""

    def __init__(
        self, shared: EngineContext, replicator: Replicator, spots: SpotChecks, portions: PortionSteps
    ) -> None:
        self._shared, self._plan, self._outbox, self._states = shared, shared.plan, shared.outbox, shared.states
        self._replicator, self._spots, self._portions = replicator, spots, portions
        self._actions: dict[type, Callable[[CellStep, Any], None]] = {
            Evaluate: self._evaluate,
            Forward: self._forward,
            Backward: self._backward,
            BackwardInput: self._backward,
            BackwardWeight: self._weight_gradients,
            BackwardRest: self._backward_rest,
            SendPartialSum: self._send_partial_sum,
            AddPartialSums: self._add_partial_sums,
            ScatterGradients: self._scatter,
            ReduceGradients: self._reduce,
            GatherGradients: self._gather,
            ExchangeTied: self._exchange_tied,
            SumTied: self._sum_tied,
            SyncReplicas: self._sync,
            ReportReady: self._report_ready,
        }

    def execute(self, cell_step: CellStep, instruction: Instruction) -> None:
        self._actions[type(instruction)](cell_step, instruction)

    def _parts(self, cell_step: CellStep, microbatch: int | None = None) -> tuple[Stage, Work]:
        """Return the stage, and the work on the step or, for a microbatch in `CellStep.again`, on that microbatch."""
        work = cell_step.work if microbatch is None else cell_step.again.get(microbatch, cell_step.work)
        assert work is not None
        return self._states.running(cell_step.cell), work

    def _forward(self, cell_step: CellStep, instruction: Forward) -> None:
        (d, s), m = cell_step.cell, instruction.microbatch
        stage, work = self._parts(cell_step, m)
        stage.expect(self._coming(cell_step))
        taken = cell_step.take_input()
        inputs, place = taken.inputs if taken else None, (cell_step.step, m)
        if self._spots.wants(cell_step, m):
            outputs = self._spots.forward(cell_step, stage, m, taken)
        elif self._is_timed_by_layer(cell_step, stage):
            outputs = self._shared.devices.forward_by_layer(stage, work, place, inputs)
        else:
            outputs = stage.forward(work, *place, inputs)
        if s < self._plan.stages - 1:
            facts = FrameFacts.of(part.requires_grad for part in outputs if part.is_floating_point())
            address = Address(FrameKind.ACTIVATION, d, s + 1, *place)
            self._outbox.emit(address, [part.detach() for part in outputs], facts)

    def _is_timed_by_layer(self, cell_step: CellStep, stage: Stage) -> bool:
        """Count an ordinary forward; return whether to run it layer by layer (the same bits) and time each layer. Do
        not count forwards of a committed step or a takeover, or a stage's first one, which `Stage.checked` must run.
        """
        ordinary = stage.has_run and cell_step.is_ordinary(self._shared.log.newest)
        return ordinary and self._shared.timer.begins_forward(cell_step.cell.stage)

    def _evaluate(self, cell_step: CellStep, instruction: Evaluate) -> None:
        stage, work = self._parts(cell_step)
        (d, s), step, m = cell_step.cell, cell_step.step, instruction.microbatch
        taken = cell_step.take_input()
        outputs = stage.evaluate(work, m, taken.tensors if taken else None)
        if s < self._plan.stages - 1:
            self._outbox.emit(Address(FrameKind.ACTIVATION, d, s + 1, step, m, EVALUATED), outputs)

    def _coming(self, cell_step: CellStep) -> Iterator[tuple[int, int]]:
        """Yield (step, microbatch) of the forwards expected next, to read data ahead; a new plan may change them."""
        assert cell_step.layout is not None
        for instruction in islice(cell_step.program, cell_step.done + 1, None):
            if isinstance(instruction, Forward):
                yield cell_step.step, instruction.microbatch
        if cell_step.is_portion:
            return
        for step in range(cell_step.step + 1, self._shared.ports.steps):
            for microbatch in cell_step.layout.split[cell_step.cell.pipeline]:
                yield step, microbatch

    def _backward(self, cell_step: CellStep, instruction: Backward) -> None:
        (d, s), m = cell_step.cell, instruction.microbatch
        stage, work = self._parts(cell_step, m)
        spot, given = self._spots.is_made(cell_step, m), cell_step.take_input()
        postpone = isinstance(instruction, BackwardInput) and not spot
        inputs = stage.backward(work, cell_step.step, m, work.received(given), postpone=postpone)
        if spot:
            self._spots.backward(cell_step, m, given, inputs)
        if s > 0:
            facts = FrameFacts.of((gradient is not None for gradient in inputs), work.weights.get(m))
            present = [gradient for gradient in inputs if gradient is not None]
            self._outbox.emit(Address(FrameKind.GRADIENT, d, s - 1, cell_step.step, m), present, facts)
        if cell_step.again.pop(m, None) is None:
            self._portions.give_finished(cell_step, work)

    def _weight_gradients(self, cell_step: CellStep, instruction: BackwardWeight) -> None:
        stage, work = self._parts(cell_step)
        stage.weight_gradients(work, cell_step.step, instruction.microbatch)
        self._portions.give_finished(cell_step, work)

    def _backward_rest(self, cell_step: CellStep, instruction: BackwardRest) -> None:
        stage, work = self._parts(cell_step)
        stage.backward_rest(work, cell_step.step, instruction.microbatch)

    def _send_partial_sum(self, cell_step: CellStep, instruction: SendPartialSum) -> None:
        _stage, work = self._parts(cell_step)
        payload, tensors = packed_work(work, instruction.portion, work.gradients.nodes())
        address = Address(FrameKind.PARTIAL_SUM, *cell_step.cell, cell_step.step, *instruction.portion)
        self._outbox.emit(address, tensors, payload)
        cell_step.work = None

    def _add_partial_sums(self, cell_step: CellStep, instruction: AddPartialSums) -> None:
        _stage, work = self._parts(cell_step)
        for portion in instruction.portions:
            frame = cell_step.take(Address(FrameKind.PARTIAL_SUM, *cell_step.cell, cell_step.step, *portion))
            resume(work, portion, frame.payload, frame.tensors)

    def _scatter(self, cell_step: CellStep, instruction: ScatterGradients) -> None:
        """Send each other pipeline its chunk of one bucket of a sum (reduce-scatter)."""
        stage, work = self._parts(cell_step)
        assert cell_step.layout is not None
        (d, s), bucket, pipelines = cell_step.cell, instruction.bucket, cell_step.layout.pipelines
        total = work.gradients.of(instruction.node, bucket)
        for e in range(pipelines):
            if e != d:
                address = Address(FrameKind.CONTRIBUTION, e, s, cell_step.step, bucket, instruction.node.first)
                self._outbox.emit(address, (_apart(total[_chunk(stage.values.buckets[bucket], pipelines, e)]),))

    def _reduce(self, cell_step: CellStep, instruction: ReduceGradients) -> None:
        stage, work = self._parts(cell_step)
        assert cell_step.layout is not None
        (d, s), layout, bucket = cell_step.cell, cell_step.layout, instruction.bucket
        pipelines, groups = layout.pipelines, len(layout.bounds) - 1
        own, piece = work.gradients.nodes(bucket), _chunk(stage.values.buckets[bucket], pipelines, d)
        shares = {node: total[piece] for node, total in own}
        for node in (node for e in range(pipelines) if e != d for node in layout.sums(e)):
            address = Address(FrameKind.CONTRIBUTION, d, s, cell_step.step, bucket, node.first)
            (shares[node],) = cell_step.take(address).tensors
        cell_step.final = own[-1][1]
        total = cell_step.final[piece]
        for some in pieces(total.numel()):
            brought = stage.bring(share[some] for share in shares.values())
            total[some] = tree_sum(dict(zip(shares, brought, strict=True)), groups)
        for e in range(pipelines):
            if e != d:
                self._outbox.emit(Address(FrameKind.RESULT, e, s, cell_step.step, bucket, d), (_apart(total),))

    def _gather(self, cell_step: CellStep, _: GatherGradients) -> None:
        stage, _work = self._parts(cell_step)
        assert cell_step.layout is not None
        assert cell_step.final is not None
        (d, s), pipelines = cell_step.cell, cell_step.layout.pipelines
        self._outbox.finish()  # what is sent of the sum has left before it is overwritten
        for bucket, place in enumerate(stage.values.buckets):
            for e in range(pipelines):
                if e != d:
                    frame = cell_step.take(Address(FrameKind.RESULT, d, s, cell_step.step, bucket, e))
                    (share,), total = frame.tensors, cell_step.final[_chunk(place, pipelines, e)]
                    for some in pieces(total.numel()):
                        total[some] = stage.bring((share[some],))[0]

    def _exchange_tied(self, cell_step: CellStep, _: ExchangeTied) -> None:
        stage, _work = self._parts(cell_step)
        gradient, (d, s) = cell_step.final_gradient(), cell_step.cell
        for other in self._states.tied_to(cell_step.cell):
            shared = [segment for segment in stage.values.tied if other in segment.stages]
            pieces = tuple(gradient[place].clone() for segment in shared for place in segment.places(s))
            self._outbox.emit(Address(FrameKind.TIED, d, other, cell_step.step, 0, s), pieces)

    def _sum_tied(self, cell_step: CellStep, _: SumTied) -> None:
        stage, _work = self._parts(cell_step)
        (d, s), final = cell_step.cell, cell_step.final_gradient()
        self._outbox.finish()  # what is sent of the gradient has left before it is overwritten
        received = {
            other: iter(stage.bring(cell_step.take(Address(FrameKind.TIED, d, s, cell_step.step, 0, other)).tensors))
            for other in self._states.tied_to(cell_step.cell)
        }
        for segment in stage.values.tied:
            own = iter(segment.places(s))
            pieces = (final[next(own)] if use.stage == s else next(received[use.stage]) for use in segment.uses)
            total = next(pieces).to(torch.float32, copy=True)
            for piece in pieces:
                total += piece
            final[segment.offset : segment.offset + segment.size] = total

    def _sync(self, cell_step: CellStep, _: SyncReplicas) -> None:
        stage, work = self._parts(cell_step)
        final = cell_step.final_gradient()[: stage.values.size]
        cell_step.figures = self._shared.ports.copies.start((stage.values.squared_norms(final), *work.figures()))
        self._replicator.finalize(cell_step.cell.stage, cell_step.step, final)
        cell_step.final = None  # the states have it, once for all cells of the stage
        work.gradients.drop()

    def _report_ready(self, cell_step: CellStep, _: ReportReady) -> None:
        _stage, work = self._parts(cell_step)
        squares: list[float] = []
        if cell_step.figures is not None:  # of a step, and not of an evaluation after the last one
            self._states.allow_commit(cell_step.step)
            norms, *losses = cell_step.figures.wait()
            squares = norms.tolist()
            work.read(losses)
        report = step_report(cell_step.cell, squares, work)
        source = cell_step.cell.pipeline * self._plan.stages + cell_step.cell.stage
        self._outbox.emit(Address(FrameKind.READY, *ROOT, cell_step.step, 0, source), payload=report)


def _chunk(bucket: slice, parts: int, index: int) -> slice:
    """Return the index-th of `parts` nearly equal, contiguous chunks of a bucket's elements, as a slice."""
    size = bucket.stop - bucket.start
    return slice(bucket.start + size * index // parts, bucket.start + size * (index + 1) // parts)


def _apart(piece: Tensor) -> Tensor:
    """Return a piece of a gradient for a frame, copied if it is in host memory: later instructions write to it."""
    return piece.clone() if piece.is_cpu else piece
