"""What it costs that gradients are summed in an order that no grid changes: one worker's step with and without groups.

    python bench/gradient_groups.py [--width 512] [--blocks 2] [--microbatches 16] [--rows 8] [--steps 8]

One stage of a GPT model in one thread, in turn with one group (as with `training.reproducible: false`), with 16 and
with as many as there are microbatches. CPU time of the process, so other processes hardly count; and the buffers.
"""

import argparse
import statistics
import time

from _gpt_stage import add_arguments, gpt_stage
from bamboo_core.planning.gradient_groups import group_bounds
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.training import TrainingConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, width=512)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="samples of 128 tokens in a microbatch")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    with gpt_stage(arguments.width, arguments.blocks, microbatches=arguments.microbatches, rows=arguments.rows) as (
        stage,
        config,
    ):
        measure(stage, config, arguments.steps)


def measure(stage: Stage, config: TrainingConfig, steps: int) -> None:
    choices = sorted({1, min(16, config.microbatches), config.microbatches})
    seconds: dict[int, list[float]] = {groups: [] for groups in choices}
    most = dict.fromkeys(choices, 0)
    step(stage, config, 1)  # the first one is looked at more closely
    for _ in range(steps):
        for groups in choices:
            begun = time.process_time()
            most[groups] = step(stage, config, groups)
            seconds[groups].append(time.process_time() - begun)
    alone = statistics.median(seconds[1])
    size = stage.values.final.size
    print(f"{size / 1e6:.1f} million parameters, {config.microbatches} microbatches of {config.micro_batch_size}")
    for groups in choices:
        ratios = [a / b for a, b in zip(seconds[groups], seconds[1], strict=True)]
        print(
            f"{groups:3} groups: {statistics.median(seconds[groups]):.3f} s of CPU time a step, "
            f"{statistics.median(ratios):.4f} of one group's {alone:.3f} s; {most[groups]} buffers"
        )


def step(stage: Stage, config: TrainingConfig, groups: int) -> int:
    """One; returns the most buffers there were."""
    work = stage.begin(range(config.microbatches), group_bounds(config.microbatches, groups))
    most = 0
    for microbatch in range(config.microbatches):
        stage.forward(work, 0, microbatch, None)
        most = max(most, len(list(work.gradients.tensors())))
        stage.backward(work, 0, microbatch, None)
    assert work.gradients.total().any()
    return most


if __name__ == "__main__":
    main()
