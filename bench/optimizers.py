"""What an optimizer's step takes with each of torch's kernels: `StageValues.apply`, as owners and replicas run it.

    python bench/optimizers.py [--width 512] [--blocks 4] [--rows 8] [--repeat 9]

One stage of a GPT with AdamW in this process, on one thread. The kernels take turns; CPU time of the process, and the
median of the ratios of neighbours.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from _gpt_stage import add_arguments, add_turns, gpt_stage
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.training import TrainingConfig

KERNELS = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, width=512)
    add_turns(parser)
    arguments = parser.parse_args()
    with gpt_stage(arguments.width, arguments.blocks, microbatches=8, rows=arguments.rows) as (stage, config):
        measure(stage, config, arguments.repeat)


def measure(stage: Stage, config: TrainingConfig, repeat: int) -> None:
    torch.manual_seed(0)
    gradient = torch.rand(stage.values.final.size)  # all marks are more than zero
    stages = {name: with_kernel(stage, config, said) for name, said in KERNELS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in KERNELS}
    for turn in range(repeat + 1):
        for name, one in stages.items():
            taken = timed(lambda one=one: one.values.apply(gradient, 1.0))  # type: ignore[misc]
            if turn:  # the first one allocates
                seconds[name].append(taken)
    stage.rehearse(0, 0, None)
    microbatch = statistics.median(timed(lambda: stage.rehearse(0, 0, None)) for _ in range(repeat))
    print(f"{stage.values.final.size / 1e6:.1f} million parameters; a microbatch takes {microbatch * 1000:.0f} ms")
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds["fused"], strict=True))
        print(f"{name:10} {statistics.median(found) * 1000:7.1f} ms, {ratio:.2f} of fused")


def with_kernel(stage: Stage, config: TrainingConfig, said: dict[str, Any]) -> Stage:
    task = replace(stage.values.task, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], **said))
    return build_stage(task, 0, [(stage.values.first, stage.values.end)], config)


def timed(what: Callable[[], object]) -> float:
    """Seconds of CPU time."""
    began = time.process_time()
    what()
    return time.process_time() - began


if __name__ == "__main__":
    main()
