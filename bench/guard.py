"""What the sums of a state cost that holders compare: in CPU time, beside a step of the same stage.

    python bench/guard.py [--width 512] [--blocks 2] [--microbatches 8]

One stage of a GPT in this process, on one thread, with AdamW in fp32. Sums are taken of a stage and of its replica, at
every 32nd step, and twice when a checkpoint is taken.
"""

import argparse
import time
from collections.abc import Callable

import torch

from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.commit.state_checks import EVERY
from bamboo_trainer.loading import load_task
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.training import TrainingConfig


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
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count, rows = arguments.microbatches, 8
    task = {
        "entrypoint": "bamboo_trainer.models.gpt:build",
        "config": {"dModel": arguments.width, "heads": 8, "blocks": arguments.blocks, "context": 64, "text": "stdlib"},
    }
    spec = parse_manifest(
        {
            "apiVersion": "bamboo.dev/v1alpha1",
            "kind": "BambooJob",
            "metadata": {"name": "guard"},
            "spec": {
                "task": task,
                "training": {"steps": 9, "globalBatchSize": count * rows, "microBatchSize": rows},
                "topology": {"stages": 1},
            },
        }
    )
    loaded = load_task(spec.task.entrypoint, spec.task.config)
    stage = build_stage(loaded, 0, [(0, len(loaded.layers))], TrainingConfig.of(spec.training))
    stage.rehearse(0, 0, None)
    work = stage.begin([0], [0, 1])

    def microbatch() -> None:
        nonlocal work
        work = stage.begin([0], [0, 1])
        stage.forward(work, 0, 0, None)
        stage.backward(work, 0, 0, None)

    one = best(microbatch)
    values, gradient = stage.values, work.gradients.total()[: stage.values.final.size]
    values.apply(gradient, 1.0)
    update = best(lambda: values.apply(gradient, 1.0))
    sums = best(values.checksums)
    step = count * one + update
    size = sum(part.nbytes for part in values.snapshot()[0])
    print(f"{values.final.size / 1e6:.1f} million parameters; a step of {count} microbatches takes {step:.2f} s")
    print(f"an optimizer step {update * 1e3:.0f} ms; sums {sums * 1e3:.0f} ms, {size / sums / 1e9:.1f} GB/s")
    print(f"of a stage and of a replica at every {EVERY} steps: {100 * 2 * sums / EVERY / step:.3f} % of a step")


if __name__ == "__main__":
    main()
