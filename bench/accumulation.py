"""What it would give if the kernel of a weight's gradient added to the sum by itself, as Megatron's does.

    python bench/accumulation.py [--width 512] [--blocks 4] [--rows 8] [--repeat 9]

First what a microbatch spends on adding: autograd adds a gradient to its place in the sum when it is made. Then a
product and a sum in two kernels against one (`addmm` with beta 1), in turn on one thread: the median of the ratios, and
in how many numbers the bits differ. Last an H100 by arithmetic.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from _gpt_stage import CONTEXT, add_arguments, add_turns, gpt_stage
from bamboo_trainer.stage.stage import Stage

FLOPS, BANDWIDTH = 0.4 * 989e12, 0.9 * 3.35e12  # of an H100: two fifths of its bf16 peak; bytes a second
# Bytes for a parameter of a microbatch under autocast to bf16. Now: the product is written, cast to fp32 and added.
NOW, IN_KERNEL = 2 + (2 + 4) + (4 + 4 + 4), 4 + 4
ADDING = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, width=512)
    add_turns(parser)
    arguments = parser.parse_args()
    with gpt_stage(arguments.width, arguments.blocks, microbatches=8, rows=arguments.rows) as (stage, _):
        print(f"adding is {100 * share_of_adding(stage):.2f} % of a microbatch's forward and backward")
    one_kernel_or_two(arguments.width, arguments.rows * CONTEXT, arguments.repeat)
    for tokens in (2048, 4096, 8192, 16384):
        compute, saved = 6 * tokens / FLOPS, (NOW - IN_KERNEL) / BANDWIDTH
        print(f"on an H100, {tokens:5} tokens in a microbatch: {100 * saved / compute:.1f} % of its compute")


def share_of_adding(stage: Stage) -> float:
    work = stage.begin(range(3), [0, 3])
    for microbatch in range(2):  # the first one is looked at more closely
        stage.forward(work, 0, microbatch, None)
        stage.backward(work, 0, microbatch, None)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        stage.forward(work, 0, 2, None)
        stage.backward(work, 0, 2, None)
    events = profiled.key_averages()
    adding = sum(event.cpu_time_total for event in events if event.key == ADDING)
    return float(adding / sum(event.self_cpu_time_total for event in events))


def one_kernel_or_two(width: int, tokens: int, repeat: int) -> None:
    torch.manual_seed(0)
    given, gradient, sums = torch.randn(tokens, width), torch.randn(tokens, 4 * width), torch.randn(4 * width, width)
    outs = {"two": sums.clone(), "one": sums.clone()}
    ways: dict[str, Callable[[Tensor], object]] = {
        "two": lambda out: out.add_(gradient.t() @ given),
        "one": lambda out: torch.addmm(out, gradient.t(), given, out=out),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name, way in ways.items():
            out = outs[name].copy_(sums)
            began = time.process_time()
            way(out)
            if turn:
                seconds[name].append(time.process_time() - began)
    ratio = statistics.median(a / b for a, b in zip(seconds["two"], seconds["one"], strict=True))
    differ = float((outs["one"] != outs["two"]).float().mean())
    print(f"two kernels take {ratio:.3f} of one's time; {100 * differ:.0f} % of the numbers have other bits")


if __name__ == "__main__":
    main()
