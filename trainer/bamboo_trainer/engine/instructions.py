"""What each instruction does: one method per instruction, found by its type."""

from collections.abc import Callable
from typing import Any

import torch

from bamboo.plan import ROOT
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
from bamboo_trainer.transport.frames import Address, Kind
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

    def _parts(self, run: CellStep) -> tuple[Stage, Work]:
        assert run.work is not None
        return self._states[run.cell.stage], run.work

    def _forward(self, run: CellStep, instruction: Forward) -> None:
        stage, work = self._parts(run)
        (d, s), m = run.cell, instruction.microbatch
        self._expect_next(run, stage)
        address = Address(Kind.ACTIVATION, d, s, run.step, m)
        if run.ahead and run.is_ahead(instruction):
            run.drop(address)
            outputs = run.ahead.outputs.pop(m)
        elif run.ahead and m in run.ahead.forwardings:
            run.drop(address)
            forwarding = run.ahead.forwardings.pop(m)
            while not forwarding.done:
                stage.advance(forwarding)
            outputs = stage.complete(work, forwarding)
        else:
            outputs = stage.forward(work, run.step, m, run.take(address).tensors if s > 0 else None)
        if s < self._plan.stages - 1:
            self._outbox.emit(Address(Kind.ACTIVATION, d, s + 1, run.step, m), outputs)

    def _expect_next(self, run: CellStep, stage: Stage) -> None:
        """Have the data of the forward after this one read while this one runs."""
        assert run.layout is not None
        later = [i.microbatch for i in run.program[run.done + 1 :] if isinstance(i, Forward)]
        if later:
            stage.expect(run.step, later[0])
        elif run.step + 1 < self._steps:
            stage.expect(run.step + 1, run.layout.split[run.cell.pipeline][0])

    def _backward(self, run: CellStep, instruction: Backward) -> None:
        stage, work = self._parts(run)
        (d, s), m = run.cell, instruction.microbatch
        address = Address(Kind.GRADIENT, d, s, run.step, m)
        if run.ahead and run.is_ahead(instruction):
            run.drop(address)
            inputs = run.ahead.gradients.pop(m)
        else:
            given = run.take(address).tensors if s < self._plan.stages - 1 else None
            inputs = stage.backward(work, run.step, m, given)
        if s > 0:
            self._outbox.emit(Address(Kind.GRADIENT, d, s - 1, run.step, m), inputs)

    def _scatter(self, run: CellStep, _: ScatterGradients) -> None:
        stage, work = self._parts(run)
        assert run.layout is not None
        d, s = run.cell
        for e in range(run.layout.pipelines):
            if e != d:
                share = work.gradient[chunk(stage.size, run.layout.pipelines, e)]
                self._outbox.emit(Address(Kind.CONTRIBUTION, e, s, run.step, 0, d), (share,))

    def _reduce(self, run: CellStep, _: ReduceGradients) -> None:
        stage, work = self._parts(run)
        assert run.layout is not None
        (d, s), pipelines = run.cell, run.layout.pipelines
        total: torch.Tensor | None = None
        for e in range(pipelines):
            if e == d:
                share = work.gradient[chunk(stage.size, pipelines, d)]
            else:
                share = run.take(Address(Kind.CONTRIBUTION, d, s, run.step, 0, e)).tensors[0].to(work.gradient.device)
            total = share.clone() if total is None else total.add_(share)
        assert total is not None
        run.final = torch.empty_like(work.gradient)
        run.final[chunk(stage.size, pipelines, d)] = total
        for e in range(pipelines):
            if e != d:
                self._outbox.emit(Address(Kind.RESULT, e, s, run.step, 0, d), (total,))

    def _gather(self, run: CellStep, _: GatherGradients) -> None:
        assert run.layout is not None
        assert run.final is not None
        (d, s), pipelines = run.cell, run.layout.pipelines
        for e in range(pipelines):
            if e != d:
                share = run.take(Address(Kind.RESULT, d, s, run.step, 0, e)).tensors[0]
                run.final[chunk(run.final.numel(), pipelines, e)] = share

    def _exchange_tied(self, run: CellStep, _: ExchangeTied) -> None:
        stage, _work = self._parts(run)
        gradient, (d, s) = run.final_gradient(), run.cell
        for other in self._states.tied_to(s):
            shared = [t for t in _segments(stage) if other in t.stages]
            pieces = tuple(gradient[t.offset : t.offset + t.size].clone() for t in shared)
            self._outbox.emit(Address(Kind.TIED, d, other, run.step, 0, s), pieces)

    def _sum_tied(self, run: CellStep, _: SumTied) -> None:
        stage, _work = self._parts(run)
        (d, s), final = run.cell, run.final_gradient()
        segments = _segments(stage)
        received = {t: run.take(Address(Kind.TIED, d, s, run.step, 0, t)).tensors for t in self._states.tied_to(s)}
        for segment in segments:
            own = final[segment.offset : segment.offset + segment.size]
            total = torch.zeros_like(own)
            for other in sorted(segment.stages):
                shared = [t.group for t in segments if other in t.stages]
                total += own if other == s else received[other][shared.index(segment.group)].to(own.device)
            own.copy_(total)

    def _sync(self, run: CellStep, _: SyncReplicas) -> None:
        self._replicator.finalize(run.cell.stage, run.step, run.final_gradient())

    def _report_ready(self, run: CellStep, _: ReportReady) -> None:
        stage, work = self._parts(run)
        norm_squared = stage.norm_squared(run.final_gradient())
        report = Ready(cell=run.cell, norm_squared=norm_squared, losses=dict(work.losses))
        source = run.cell.pipeline * self._plan.stages + run.cell.stage
        self._outbox.emit(Address(Kind.READY, *ROOT, run.step, 0, source), payload=report)


def _segments(stage: Stage) -> list[TiedSegment]:
    """In an order that all stages agree on."""
    return sorted(stage.tied_segments(), key=lambda t: t.group)
