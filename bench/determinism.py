"""What it costs to look whether a task is deterministic: at the start, and when holders of a stage compare it.

    python bench/determinism.py [--width 1024] [--blocks 2]
    python bench/determinism.py --running 8     what BatchNorm's running statistics cost instead, in so many rounds

One stage of a GPT in this process, on one thread. Prints the look at the start in microbatches, and the sums of all
parameters in optimizer steps; from these follows what a comparison every so many steps costs.
"""

import argparse
import time
from collections.abc import Callable

from _batchnorm import compare
from _gpt_stage import add_arguments, gpt_stage
from bamboo_core.planning.plan import Layout
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer.commit.state_checks import EVERY
from bamboo_trainer.engine.steps.spot_checks import forward_by_layer
from bamboo_trainer.stage.checksums import checksum
from bamboo_trainer.stage.stage import Stage


def best(what: Callable[[], object], times: int = 5) -> float:
    """Seconds of CPU time, the least of some."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        what()
        taken.append(time.process_time() - began)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, width=1024)
    parser.add_argument("--running", type=int, metavar="ROUNDS")
    arguments = parser.parse_args()
    if arguments.running:
        with_them, without, size = compare(arguments.running)
        print(f"a step of a ResNet-50: {with_them:.3f} s of CPU time, {without:.3f} without running statistics,")
        print(
            f"{100 * (with_them / without - 1):.1f} % more; a pipeline sends {size / 2**20:.2f} MiB of them in a step"
        )
        return
    with gpt_stage(arguments.width, arguments.blocks, microbatches=8, rows=8) as (stage, _):
        measure(stage)


def measure(stage: Stage) -> None:
    work = stage.begin([0], [0, 1])
    stage.rehearse(0, 0, None)

    def microbatch() -> None:
        nonlocal work
        work = stage.begin([0], [0, 1])
        stage.forward(work, 0, 0, None)
        stage.backward(work, 0, 0, None)

    one = best(microbatch)
    look = best(lambda: stage.look(0, 0, None), times=2)
    values, gradient = stage.values, work.gradients.total()[: stage.values.final.size]
    values.apply(gradient, 1.0)
    step = best(lambda: values.apply(gradient, 1.0))
    sums = best(values.checksums)
    print(f"{values.final.size / 1e6:.1f} million parameters")
    print(f"a microbatch {one:.2f} s; the look at the start {look:.2f} s, {look / one:.1f} microbatches")
    speed = 4 * values.final.size / sums / 1e9
    print(f"an optimizer step {step * 1e3:.0f} ms; sums {sums * 1e3:.1f} ms, {speed:.1f} GB/s")
    trial = best(lambda: values.apply(gradient, 1.0, tries=True)) - step
    print_spot_check(stage, one, step, trial)
    print(f"every {EVERY} steps: {100 * sums / EVERY / (8 * one + step):.3f} % of a step of 8 microbatches")


def print_spot_check(stage: Stage, microbatch: float, step: float, trial: float) -> None:
    """What a spot check takes of whoever computes a microbatch again, and of the owner. Times as measured so far."""
    work = stage.begin([0], [0, 1])

    def again() -> None:
        nonlocal work
        work = stage.begin([0], [0, 1])
        forward_by_layer(stage, work, (stage.values.version, 0), None)
        stage.backward(work, stage.values.version, 0, None)
        assert work.gradients.alone is not None
        checksum(work.gradients.alone)

    taken = best(again)
    layout = Layout(generation=0, split=(tuple(range(8)),))
    every = SpotSchedule().interval(layout)
    whole, owner = every * (8 * microbatch + step), taken - microbatch + trial
    print(f"a spot check: {taken:.2f} s in waits, and {owner * 1e3:.1f} ms of the owner ({trial * 1e3:.1f} ms of them")
    print(f"    for the optimizer); every {every} steps of 8 microbatches that is {100 * taken / whole:.2f} % and")
    print(f"    {100 * owner / whole:.3f} % of a worker's work")


if __name__ == "__main__":
    main()
