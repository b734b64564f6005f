"""The backward of a compiled layer, as two graphs and as one, and what its share of weight gradients makes of a step.

    python bench/cut_backwards.py [--width 256] [--samples 4] [--json FILE]

A block of the GPT, on one thread. The sides are run in turn, round by round; figures are medians. The steps are by the
arithmetic of `bench/schedules.py`, with what a forward and the halves of a backward take.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from _common import machine, median, show, write_json
from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.schedule import StageOrder
from bamboo_trainer.compilation.compiled_layers import CompiledLayers
from bamboo_trainer.models import gpt
from bamboo_trainer.stage.gradients.weight_gradients import split
from schedules import own, seconds_of_step

CONTEXT = 128  # tokens of a sample
WARMUP = 3
ONE, CUT, EAGER = "compiled, one graph", "compiled, two graphs", "not compiled"


def block(width: int) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("def f(): pass\n" * 2000)
        task = gpt.build({"dModel": width, "heads": 8, "blocks": 1, "context": CONTEXT, "text": str(text)})
        made: nn.Module = task.layers[1]()
        return made


def timed(layer: Callable[[Tensor], Tensor], given: Tensor, *, halves: bool) -> dict[str, float]:
    """Milliseconds: of a forward F, a backward B, and of its halves I and W."""
    times = [time.perf_counter()]
    leaf = given.detach().requires_grad_()
    output = layer(leaf.view_as(leaf))
    times.append(time.perf_counter())
    back = torch.ones_like(output)
    if halves:
        rest = split([(output, back)], (leaf,))
        assert rest is not None
        times.append(time.perf_counter())
        rest.compute()
    else:
        torch.autograd.backward(output, back)
    times.append(time.perf_counter())
    taken = [1e3 * (b - a) for a, b in pairwise(times)]
    parts = {"I": taken[1], "W": taken[2]} if halves else {}
    return {"F": taken[0], "B": sum(taken[1:])} | parts


def step_of(schedule: PipelineSchedule, found: Mapping[str, float], stages: int, microbatches: int) -> float:
    made = own(StageOrder(schedule, 1), stages, microbatches)
    return seconds_of_step(made, 0.0, together=True, units=found)


def run(
    width: Annotated[int, typer.Option(help="Of the block.")] = 256,
    samples: Annotated[int, typer.Option(help="Of a microbatch.")] = 4,
    rounds: Annotated[int, typer.Option(help="In each of them every side runs once.")] = 40,
    stages: Annotated[int, typer.Option(min=2)] = 4,
    microbatches: Annotated[int, typer.Option(min=1)] = 8,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Time the sides, and print tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer, given = block(width), torch.randn(samples, CONTEXT, width)
    compiled = CompiledLayers({0: layer}, deterministic=True)
    whole: Callable[..., Any] = torch.compile(layer, fullgraph=True, dynamic=False)
    sides: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
        EAGER: (layer, True),
        ONE: (whole, False),
        CUT: (lambda x: compiled.call(0, x), False),
        f"{CUT}, apart": (lambda x: compiled.call(0, x), True),
    }
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for count in range(WARMUP + rounds):
        for side, (call, halves) in sides.items():
            found = timed(call, given, halves=halves)
            if count >= WARMUP:
                taken[side].append(found)
    figures = {side: {key: median([one[key] for one in ones]) for key in ones[0]} for side, ones in taken.items()}
    rows = []
    for side, one in figures.items():
        share = f"{one['W'] / one['B']:.2f}" if "W" in one else ""
        rows.append([side, *(f"{one[key]:.2f}" if key in one else "" for key in "FBIW"), share])
    columns = ["", "forward, ms", "backward", "of inputs", "of weights", "their share"]
    show(f"A block of width {width}, {samples} samples of {CONTEXT} tokens", columns, rows)
    cost = median([cut["B"] / one["B"] for cut, one in zip(taken[CUT], taken[ONE], strict=True)])
    print(f"Two graphs take {cost:.3f} times as long as one.")
    apart = figures[f"{CUT}, apart"]
    plain, late = (step_of(one, apart, stages, microbatches) for one in PipelineSchedule)
    print(
        f"A step of {stages} stages and {microbatches} microbatches: ZBH1 is {plain / late:.3f} times as fast as 1F1B."
    )
    write_json(json, {"machine": machine(), "figures": figures, "cost": cost, "steps": {"1F1B": plain, "ZBH1": late}})


if __name__ == "__main__":
    typer.run(run)
