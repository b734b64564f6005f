"""What a job's layers compute and move, counted on any machine, for profiles of devices that are not here."""

from typing import Any

import msgspec
import torch

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_trainer.check import found_or_problem
from bamboo_trainer.layer_work import layer_work
from bamboo_trainer.loading import settled_task
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.tasks.inspection.costs import layer_costs


def count(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the layers of a manifest's task compute and move. The answer has `problem`, one sentence, or `layers`: of
    each its operations and bytes, as `bamboo.profiles.layer_counts` has them, with the job's microbatch and precision.
    """
    torch.set_num_threads(1)  # as in a worker
    spec = parse_manifest(manifest)
    return found_or_problem(lambda: {"layers": _layers(spec)}, (MemoryError, OSError, RuntimeError))


def _layers(spec: JobSpec) -> list[dict[str, Any]]:
    task, spec = settled_task(spec)
    sizes, costs = measure(task, spec), layer_costs(task, spec.training.micro_batch_size)
    return [
        {
            "forward": work.forward,
            "backward": work.backward,
            **msgspec.structs.asdict(size.bytes),
            "cost": cost,
        }
        for work, size, cost in zip(layer_work(task, spec), sizes, costs, strict=True)
    ]
