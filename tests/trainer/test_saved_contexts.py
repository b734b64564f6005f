"""What autograd has saved of forwards in advance waits in host memory: on GPUs, or on pretended ones."""

import gc
import os
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import manifest
from torch import Tensor, nn

from bamboo_core.planning.plan import Cell
from bamboo_trainer.memory import saved_contexts
from bamboo_trainer.memory.host_copies import host_copies
from bamboo_trainer.memory.saved_contexts import ContextCopies, SavedContext
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.task import Task
from stage_kit import CONFIG, begin, small_gpt
from training_job import Job, check_same_bits

IS_PRETENDED = "PRETENDED_GPU" in os.environ
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
GPU = torch.device("cuda", 0)
SIZE = 64
STEPS = 3


class Chain(nn.Module):
    """Layers that save views of one tensor, inputs twice, a result that was written to in place, and parameters."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(SIZE, 3 * SIZE) for _ in range(count))
        self.to(GPU)

    def steps(self, x: Tensor) -> list[Callable[[Tensor], Tensor]]:
        def step(layer: nn.Module, given: Tensor) -> Tensor:
            q, k, v = layer(given).chunk(3, dim=1)
            scores = (q @ k.t()).softmax(dim=1)
            mixed = scores @ v
            return torch.relu_(mixed * given) + given * given

        return [lambda given, layer=layer: step(layer, given) for layer in self.layers]


def forward(copies: ContextCopies, chain: Chain, x: Tensor) -> tuple[SavedContext, Tensor]:
    context = SavedContext()
    copies.settle()
    with copies.saving(context):
        for step in chain.steps(x):
            x = step(x)
            copies.leave(context)
    return context, x.sum()


def inputs(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randn(SIZE, SIZE).to(GPU).requires_grad_()


def gradients(chain: Chain, *leaves: Tensor) -> list[list[float]]:
    found = [one.grad.cpu().flatten().tolist() for one in (*leaves, *chain.parameters()) if one.grad is not None]
    return found


def plainly(count: int = 4) -> list[list[float]]:
    chain, leaves = Chain(), [inputs(number) for number in range(count)]
    losses = []
    for leaf in leaves:
        x = leaf
        for step in chain.steps(x):
            x = step(x)
        losses.append(x.sum())
    for loss in losses:
        loss.backward()
    return gradients(chain, *leaves)


def moved(module: types.ModuleType) -> list[list[float]]:
    """The same, with contexts in host memory: that of the first is asked for at once."""
    copies, chain, leaves = module.ContextCopies(GPU), Chain(), [inputs(number) for number in range(4)]
    made = []
    for leaf in leaves:
        made.append(forward(copies, chain, leaf))
        busy = torch.ones(SIZE, SIZE, device=GPU) * 3.0  # memory that was left is used for something else
        del busy
        if len(made) == 1:
            made[0][1].backward()
    for _, loss in made[1:]:
        loss.backward()
    return gradients(chain, *leaves)


ORDER = (  # what puts the copies in order
    "self._outward.wait_stream(torch.cuda.current_stream(self._device))",
    "batch.made.record(self._outward)",
    "storage.batch.wait(self._device)",
    "torch.cuda.current_stream(device).wait_event(self.made)",
)


def let_go() -> None:
    """What earlier tests have left is freed: by the garbage collector, and by autograd's thread, which holds what it
    had last until it gets something else, here of no bytes.
    """
    gc.collect()
    nothing = torch.ones(0, device=GPU, requires_grad=True)
    (nothing * 2.0).backward(torch.ones(0, device=GPU))


@pytest.mark.skipif(not IS_PRETENDED, reason="a GPU shows it only now and then")
@pytest.mark.parametrize("line", ["", *ORDER])
def test_each_event_and_wait_is_needed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(saved_contexts.__file__).read_text()
    assert not line or source.count(line) == 1
    made = types.ModuleType("contexts_without_a_line")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(source.replace(line, "pass") if line else source, made.__name__, "exec"), made.__dict__)
    expected, found = plainly(), list[list[float]]()
    with suppress(RuntimeError):
        found = moved(made)
        torch.ones(1, device=GPU).add_(1.0)  # a mistake is told by the next piece of work
    assert (found == expected) == (line == "")
    with suppress(RuntimeError):  # the mistakes of what goes now are told here, and not in other tests
        let_go()
    with suppress(RuntimeError):
        torch.ones(1, device=GPU).add_(1.0)


def test_every_event_and_wait_is_among_those_that_are_taken_out() -> None:
    source = Path(saved_contexts.__file__).read_text().splitlines()
    marks = (".record(", "storage.batch.wait(", ".wait_event(", ".wait_stream(", ".record_stream(")
    assert {line.split("  #")[0].strip() for line in source if any(mark in line for mark in marks)} == set(ORDER)


def away(kept: Iterable[Any]) -> list[Tensor]:
    """The copies in host memory of these storages."""
    return [storage.copy for storage in kept if storage.copy is not None]


Form = tuple[torch.dtype, tuple[int, ...], int, list[Any]]


def forms(tensors: Iterable[Tensor]) -> list[Form]:
    """Types, strides, places in their storages and values."""
    return [(t.dtype, t.stride(), int(t.storage_offset()), t.detach().cpu().tolist()) for t in tensors]


class Noting(torch.autograd.Function):
    """Saves tensors, and notes in each backward what they are. With `writes` that then writes to the last one."""

    @staticmethod
    def forward(context: Any, seen: list[list[Form]], writes: bool, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(*tensors)
        context.seen, context.writes = seen, writes
        return tensors[0].sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        context.seen.append(forms(context.saved_tensors))
        if context.writes:
            context.saved_tensors[-1].zero_()
        return (None, None, *[None for _ in context.saved_tensors])


def test_only_what_nothing_else_keeps_is_moved_once_with_its_strides() -> None:
    copies, context, saved = ContextCopies(GPU), SavedContext(), list[list[Form]]()
    weight, given = torch.randn(SIZE, SIZE).to(GPU).requires_grad_(), inputs(0)
    with copies.saving(context):
        whole = (given @ weight) * 2.0
        parts = (whole, whole.t()[3:], whole[:, ::2], whole, given, weight)
        expected = forms(parts)
        out = Noting.apply(saved, False, *parts)
        kept = list(context.here.values())
        copies.leave(context)
        assert away(kept) == [], "somebody has all of them"
        del whole, parts
        copies.leave(context)
        copies.leave(context)
    (copy,) = away(kept)
    assert (copy.numel(), copy.is_pinned()) == (SIZE * SIZE, True)
    assert max(len(storage.forms) for storage in kept) == 4
    out.backward(retain_graph=True)
    assert away(kept) == []
    out.backward()
    assert saved == [expected] * 2, "it comes back once, for both"


@pytest.mark.parametrize("odd", [0, 1])
def test_what_is_saved_as_several_types_comes_back_as_each(odd: int) -> None:
    """It stays where the storage as a whole is no tensor of one of them."""
    copies, context, saved = ContextCopies(GPU), SavedContext(), list[list[Form]]()
    with copies.saving(context):
        whole = torch.randn(SIZE * SIZE + odd).to(GPU).requires_grad_() * 2.0
        even = whole.detach()[: SIZE * SIZE]
        parts = (whole, even.view(torch.int64)[3:], even.view(torch.int16), even > 0.0)
        expected = forms(parts)
        out = Noting.apply(saved, False, *parts)
        kept = list(context.here.values())
        del whole, even, parts
        copies.leave(context)
    assert len(away(kept)) == 2 - odd
    out.backward()
    assert saved == [expected]


def after_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    return (out := x.exp()).sum(), out


def after_a_number(x: Tensor) -> tuple[Tensor, Tensor]:
    factor = torch.tensor(2.0)
    return (x * factor).sum(), factor


def after_a_conjugate(x: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.complex(x, x).detach().conj()
    return (torch.complex(x, x) * other).abs().sum(), other


@pytest.mark.parametrize("make", [after_exp, after_a_number, after_a_conjugate])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_written_to_after_it_was_saved_is_refused_as_without(
    waits: bool, make: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    copies, context = ContextCopies(GPU), SavedContext()
    with copies.saving(context) if waits else nullcontext():
        total, saved = make(inputs(0))
        with torch.no_grad():
            saved.add_(1.0)
        del saved
        copies.leave(context)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_backward_writes_to_is_refused_to_the_next_as_without(waits: bool) -> None:
    copies, context = ContextCopies(GPU), SavedContext()
    with copies.saving(context) if waits else nullcontext():
        out = inputs(0).exp()
        total = Noting.apply([], True, out) + out.sum()
        kept = list(context.here.values())
        del out
        copies.leave(context)
    assert len(away(kept)) == waits
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.skipif(not IS_PRETENDED, reason="torch's allocator keeps what is free")
def test_what_was_left_or_dropped_holds_no_memory() -> None:
    copies, chain, leaf = ContextCopies(GPU), Chain(), inputs(0)
    let_go()
    before = torch.cuda.memory_allocated(GPU)
    _, loss = forward(copies, chain, leaf)
    held = torch.cuda.memory_allocated(GPU)
    copies.settle()
    assert torch.cuda.memory_allocated(GPU) - before < (held - before) / 3, "inputs of the layers, and the sum"
    del loss
    copies.settle()
    assert torch.cuda.memory_allocated(GPU) == before, "as after a step that is broken off"


def stage_of(task: Task, precision: str) -> Stage:
    config = replace(CONFIG, precision=precision, max_gradient_norm=None)
    layers = len(task.layers)
    return build_stage(task, 0, [(0, layers - 1), (layers - 1, layers)], config, GPU, None, host_copies(GPU, int))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stage_comes_to_the_same_gradients(tmp_path: Path, precision: str, checkpoint: bool) -> None:
    stage = stage_of(small_gpt(tmp_path, dropout=0.2, checkpoint=checkpoint), precision)
    outputs = stage.rehearse(0, 0, None)
    found, sent = [], tuple(torch.ones_like(part) for part in outputs)
    for on_host, postpone in ((False, False), (True, False), (True, True)):
        work = begin(stage, 0, 1)
        for m in (0, 1):
            forwarding = stage.start(0, m, None, on_host)
            while not forwarding.done:
                stage.settle()
                stage.advance(forwarding)
            stage.complete(work, forwarding)
        for m in (0, 1):
            stage.backward(work, 0, m, sent, postpone=postpone)
        stage.weight_gradients(work, 0, 1)
        assert work.contexts == {}
        found.append(work.gradients.nodes(0)[0][1].cpu())
    assert found[0].any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def document(stages: int, pipelines: int = 1, **topology: Any) -> dict[str, Any]:
    made = manifest(stages, pipelines, standby=1, steps=STEPS)
    made["spec"]["training"].update(globalBatchSize=16 * pipelines, microBatchSize=2)
    made["spec"]["topology"] |= topology
    return made


Grid = tuple[int, int, int, str]  # stages, pipelines, devices of a worker, schedule
GRIDS: list[Grid] = [(4, 1, 1, "1F1B"), (4, 1, 1, "ZBH1"), (2, 2, 1, "1F1B"), (2, 1, 2, "ZBH1")]


LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
LOSSES = [
    *((grid, "EagerForward", 16) for grid in (GRIDS[1], GRIDS[3])),
    *(
        pytest.param(grid, mode, 1, marks=LONG, id=f"any_instruction-{n}-{mode}")
        for n, grid in enumerate(GRIDS)
        for mode in ("LazyForward", "EagerForward", "EagerBackward")
    ),
]


@pytest.mark.parametrize(("grid", "mode", "every"), LOSSES)
def test_a_loss_changes_no_bit(grid: Grid, mode: str, every: int) -> None:
    stages, pipelines, per_worker, schedule = grid
    job, plain = (document(stages, pipelines, schedule=schedule) for _ in range(2))
    job["spec"]["redundancy"] = {"placement": "Host", "mode": mode}
    plain["spec"]["redundancy"] = {"mode": "LazyForward"}
    devices = tuple(f"cuda:{number}" for number in range(min(4, torch.cuda.device_count())))
    usual = Job(plain, devices=devices, per_worker=per_worker).run()
    calm = Job(job, devices=devices, per_worker=per_worker).run()
    check_same_bits(usual, calm)
    at = [f for f in dict.fromkeys(calm.executed) if f.step == 1 and f.cell == Cell(0, 0) and not f.after]
    for fault in at[::every]:
        check_same_bits(usual, Job(job, (fault,), devices=devices, per_worker=per_worker).run())
