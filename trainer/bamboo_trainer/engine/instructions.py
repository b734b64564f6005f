"""What each instruction does: one method per instruction, found by its type."""

from collections.abc import Callable
from typing import Any

import torch

from bamboo.planning.plan import ROOT
from bamboo_trainer.commit.replicator import Replicator
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.schedule import (
    Backward,
    ExchangeTied,
    Forward,
    GatherGradients,
    Instruction,
    ReduceGradients,
    ReportReady,
    ScatterGradients,
    SumTied,
    SyncReplicas,
)
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.parameters import TiedSegment
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.work import Work
from bamboo_trainer.transport.frames import Address, FrameKind
from bamboo_trainer.transport.payloads import Ready


def chunk(size: int, parts: int, index: int) -> slice:
    """The index-th of `parts` nearly equal, contiguous chunks of `size` elements."""
    return slice(size * index // parts, size * (index + 1) // parts)


class Instructions:
    """Without a state of its own: an instruction changes the cell's step, and sends."""

    def __init__(
        self, plan: PlanState, outbox: Outbox, states: StageStates, replicator: Replicator, steps: int
    ) -> None:
        self._plan, self._outbox, self._states, self._replicator, self._steps = plan, outbox, states, replicator, steps
        self._actions: dict[type, Callable[[CellStep, Any], None]] = {
            Forward: self._forward,
            Backward: self._backward,
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

    def _parts(self, cell_step: CellStep) -> tuple[Stage, Work]:
        assert cell_step.work is not None
        return self._states[cell_step.cell.stage], cell_step.work

    def _forward(self, cell_step: CellStep, instruction: Forward) -> None:
        stage, work = self._parts(cell_step)
        (d, s), m = cell_step.cell, instruction.microbatch
        self._expect_next(cell_step, stage)
        address = Address(FrameKind.ACTIVATION, d, s, cell_step.step, m)
        if cell_step.ahead and cell_step.is_ahead(instruction):
            cell_step.drop(address)
            outputs = cell_step.ahead.outputs.pop(m)
        elif cell_step.ahead and m in cell_step.ahead.forwardings:
            cell_step.drop(address)
            forwarding = cell_step.ahead.forwardings.pop(m)
            while not forwarding.done:
                stage.advance(forwarding)
            outputs = stage.complete(work, forwarding)
        else:
            outputs = stage.forward(work, cell_step.step, m, cell_step.take(address).tensors if s > 0 else None)
        if s < self._plan.stages - 1:
            self._outbox.emit(Address(FrameKind.ACTIVATION, d, s + 1, cell_step.step, m), outputs)

    def _expect_next(self, cell_step: CellStep, stage: Stage) -> None:
        """Have the data of the forward after this one read while this one runs."""
        assert cell_step.layout is not None
        later = [i.microbatch for i in cell_step.program[cell_step.done + 1 :] if isinstance(i, Forward)]
        if later:
            stage.expect(cell_step.step, later[0])
        elif cell_step.step + 1 < self._steps:
            stage.expect(cell_step.step + 1, cell_step.layout.split[cell_step.cell.pipeline][0])

    def _backward(self, cell_step: CellStep, instruction: Backward) -> None:
        stage, work = self._parts(cell_step)
        (d, s), m = cell_step.cell, instruction.microbatch
        address = Address(FrameKind.GRADIENT, d, s, cell_step.step, m)
        if cell_step.ahead and cell_step.is_ahead(instruction):
            cell_step.drop(address)
            inputs = cell_step.ahead.gradients.pop(m)
        else:
            given = cell_step.take(address).tensors if s < self._plan.stages - 1 else None
            inputs = stage.backward(work, cell_step.step, m, given)
        if s > 0:
            self._outbox.emit(Address(FrameKind.GRADIENT, d, s - 1, cell_step.step, m), inputs)

    def _scatter(self, cell_step: CellStep, _: ScatterGradients) -> None:
        stage, work = self._parts(cell_step)
        assert cell_step.layout is not None
        d, s = cell_step.cell
        for e in range(cell_step.layout.pipelines):
            if e != d:
                share = work.gradient[chunk(stage.size, cell_step.layout.pipelines, e)]
                self._outbox.emit(Address(FrameKind.CONTRIBUTION, e, s, cell_step.step, 0, d), (share,))

    def _reduce(self, cell_step: CellStep, _: ReduceGradients) -> None:
        stage, work = self._parts(cell_step)
        assert cell_step.layout is not None
        (d, s), pipelines = cell_step.cell, cell_step.layout.pipelines
        total: torch.Tensor | None = None
        for e in range(pipelines):
            if e == d:
                share = work.gradient[chunk(stage.size, pipelines, d)]
            else:
                share = (
                    cell_step.take(Address(FrameKind.CONTRIBUTION, d, s, cell_step.step, 0, e))
                    .tensors[0]
                    .to(work.gradient.device)
                )
            total = share.clone() if total is None else total.add_(share)
        assert total is not None
        cell_step.final = torch.empty_like(work.gradient)
        cell_step.final[chunk(stage.size, pipelines, d)] = total
        for e in range(pipelines):
            if e != d:
                self._outbox.emit(Address(FrameKind.RESULT, e, s, cell_step.step, 0, d), (total,))

    def _gather(self, cell_step: CellStep, _: GatherGradients) -> None:
        assert cell_step.layout is not None
        assert cell_step.final is not None
        (d, s), pipelines = cell_step.cell, cell_step.layout.pipelines
        for e in range(pipelines):
            if e != d:
                share = cell_step.take(Address(FrameKind.RESULT, d, s, cell_step.step, 0, e)).tensors[0]
                cell_step.final[chunk(cell_step.final.numel(), pipelines, e)] = share

    def _exchange_tied(self, cell_step: CellStep, _: ExchangeTied) -> None:
        stage, _work = self._parts(cell_step)
        gradient, (d, s) = cell_step.final_gradient(), cell_step.cell
        for other in self._states.tied_to(s):
            shared = [t for t in _segments(stage) if other in t.stages]
            pieces = tuple(gradient[t.offset : t.offset + t.size].clone() for t in shared)
            self._outbox.emit(Address(FrameKind.TIED, d, other, cell_step.step, 0, s), pieces)

    def _sum_tied(self, cell_step: CellStep, _: SumTied) -> None:
        stage, _work = self._parts(cell_step)
        (d, s), final = cell_step.cell, cell_step.final_gradient()
        segments = _segments(stage)
        received = {
            t: cell_step.take(Address(FrameKind.TIED, d, s, cell_step.step, 0, t)).tensors
            for t in self._states.tied_to(s)
        }
        for segment in segments:
            own = final[segment.offset : segment.offset + segment.size]
            total = torch.zeros_like(own)
            for other in sorted(segment.stages):
                shared = [t.group for t in segments if other in t.stages]
                total += own if other == s else received[other][shared.index(segment.group)].to(own.device)
            own.copy_(total)

    def _sync(self, cell_step: CellStep, _: SyncReplicas) -> None:
        self._replicator.finalize(cell_step.cell.stage, cell_step.step, cell_step.final_gradient())

    def _report_ready(self, cell_step: CellStep, _: ReportReady) -> None:
        stage, work = self._parts(cell_step)
        norm_squared = stage.norm_squared(cell_step.final_gradient())
        report = Ready(cell=cell_step.cell, norm_squared=norm_squared, losses=dict(work.losses))
        source = cell_step.cell.pipeline * self._plan.stages + cell_step.cell.stage
        self._outbox.emit(Address(FrameKind.READY, *ROOT, cell_step.step, 0, source), payload=report)


def _segments(stage: Stage) -> list[TiedSegment]:
    """In an order that all stages agree on."""
    return sorted(stage.tied_segments(), key=lambda t: t.group)
