"""What each instruction does: one function per instruction, found by its type."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bamboo.plan import ROOT
from bamboo_trainer.commit.commit_log import Ready
from bamboo_trainer.commit.replicator import finalize
from bamboo_trainer.engine.cell_step import Run
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
from bamboo_trainer.stage.stage import Stage, TiedSegment, Work
from bamboo_trainer.transport.frames import Address, Kind

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine


def chunk(size: int, parts: int, index: int) -> slice:
    """The index-th of `parts` nearly equal, contiguous chunks of `size` elements."""
    return slice(size * index // parts, size * (index + 1) // parts)


def execute(engine: "Engine", run: Run, instruction: Instruction) -> None:
    _ACTIONS[type(instruction)](engine, run, instruction)


def _parts(engine: "Engine", run: Run) -> tuple[Stage, Work, int]:
    stage = engine.holdings[run.cell.stage].stage
    assert stage is not None
    assert run.work is not None
    assert engine.plan is not None
    return stage, run.work, len(engine.plan.stages)


def _forward(engine: "Engine", run: Run, instruction: Forward) -> None:
    stage, work, stages = _parts(engine, run)
    (d, s), m = run.cell, instruction.microbatch
    _expect_next(engine, run, stage)
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
    if s < stages - 1:
        engine.emit(engine.frame(Address(Kind.ACTIVATION, d, s + 1, run.step, m), outputs))


def _expect_next(engine: "Engine", run: Run, stage: Stage) -> None:
    """Have the data of the forward after this one read while this one runs."""
    assert run.layout is not None
    later = [i.microbatch for i in run.program[run.done + 1 :] if isinstance(i, Forward)]
    if later:
        stage.expect(run.step, later[0])
    elif run.step + 1 < engine.steps:
        stage.expect(run.step + 1, run.layout.split[run.cell.pipeline][0])


def _backward(engine: "Engine", run: Run, instruction: Backward) -> None:
    stage, work, stages = _parts(engine, run)
    (d, s), m = run.cell, instruction.microbatch
    address = Address(Kind.GRADIENT, d, s, run.step, m)
    if run.ahead and run.is_ahead(instruction):
        run.drop(address)
        inputs = run.ahead.gradients.pop(m)
    else:
        inputs = stage.backward(work, run.step, m, run.take(address).tensors if s < stages - 1 else None)
    if s > 0:
        engine.emit(engine.frame(Address(Kind.GRADIENT, d, s - 1, run.step, m), inputs))


def _scatter(engine: "Engine", run: Run, _: ScatterGradients) -> None:
    stage, work, _stages = _parts(engine, run)
    assert run.layout is not None
    d, s = run.cell
    for e in range(run.layout.pipelines):
        if e != d:
            mine = work.gradient[chunk(stage.size, run.layout.pipelines, e)]
            engine.emit(engine.frame(Address(Kind.CONTRIBUTION, e, s, run.step, 0, d), (mine,)))


def _reduce(engine: "Engine", run: Run, _: ReduceGradients) -> None:
    stage, work, _stages = _parts(engine, run)
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
            engine.emit(engine.frame(Address(Kind.RESULT, e, s, run.step, 0, d), (total,)))


def _gather(engine: "Engine", run: Run, _: GatherGradients) -> None:
    assert run.layout is not None
    assert run.final is not None
    (d, s), pipelines = run.cell, run.layout.pipelines
    for e in range(pipelines):
        if e != d:
            share = run.take(Address(Kind.RESULT, d, s, run.step, 0, e)).tensors[0]
            run.final[chunk(run.final.numel(), pipelines, e)] = share


def _final(run: Run) -> torch.Tensor:
    assert run.work is not None
    return run.final if run.final is not None else run.work.gradient


def _segments(stage: Stage) -> list[TiedSegment]:
    """In an order that all stages agree on."""
    return sorted(stage.tied_segments(), key=lambda t: t.group)


def _exchange_tied(engine: "Engine", run: Run, _: ExchangeTied) -> None:
    stage, _work, _stages = _parts(engine, run)
    gradient, (d, s) = _final(run), run.cell
    for other in engine.tied_stages(s):
        shared = [t for t in _segments(stage) if other in t.stages]
        pieces = tuple(gradient[t.offset : t.offset + t.size].clone() for t in shared)
        engine.emit(engine.frame(Address(Kind.TIED, d, other, run.step, 0, s), pieces))


def _sum_tied(engine: "Engine", run: Run, _: SumTied) -> None:
    stage, _work, _stages = _parts(engine, run)
    (d, s), final = run.cell, _final(run)
    segments = _segments(stage)
    received = {t: run.take(Address(Kind.TIED, d, s, run.step, 0, t)).tensors for t in engine.tied_stages(s)}
    for segment in segments:
        own = final[segment.offset : segment.offset + segment.size]
        total = torch.zeros_like(own)
        for other in sorted(segment.stages):
            shared = [t.group for t in segments if other in t.stages]
            total += own if other == s else received[other][shared.index(segment.group)].to(own.device)
        own.copy_(total)


def _sync(engine: "Engine", run: Run, _: SyncReplicas) -> None:
    finalize(engine, run.cell.stage, run.step, _final(run))


def _report_ready(engine: "Engine", run: Run, _: ReportReady) -> None:
    stage, work, _stages = _parts(engine, run)
    report = Ready(norm_squared=stage.norm_squared(_final(run)), losses=dict(work.losses))
    address = Address(Kind.READY, *ROOT, run.step, run.cell.pipeline, run.cell.stage)
    engine.emit(engine.frame(address, meta=report))


_ACTIONS: dict[type, Callable[["Engine", Run, Any], None]] = {
    Forward: _forward,
    Backward: _backward,
    ScatterGradients: _scatter,
    ReduceGradients: _reduce,
    GatherGradients: _gather,
    ExchangeTied: _exchange_tied,
    SumTied: _sum_tied,
    SyncReplicas: _sync,
    ReportReady: _report_ready,
}
