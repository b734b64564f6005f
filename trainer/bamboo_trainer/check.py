"""Checks of a job's task for `bamboo validate --load` and `bamboo submit`: errors, stages and memory. This module also
counts a task's layers, for simulations.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, fewest_stages, in_force, most_stages
from bamboo_core.planning.grid import layer_ranges
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.text import one_line
from bamboo_trainer.checkpoint.initial import begin_with
from bamboo_trainer.loading import settled_task, task_of
from bamboo_trainer.memory.estimate import MemoryByKind, measure, worker_memory
from bamboo_trainer.stage.compilation import require_toolchain
from bamboo_trainer.tasks.evaluation import evaluation_schedule, try_measurements
from bamboo_trainer.tasks.inspection import split_costs
from bamboo_trainer.worker.loggers import loggers_of


def check(manifest: dict[str, Any]) -> dict[str, Any]:
    """Load and try a manifest's task without training; return its sizes as JSON values, or {"problem": one sentence}.

    initial: lines about task.initialFrom. layers, parameters: their numbers; tied ones count once. stages: each stage's
    first layer, last layer and number of parameters; if the coordinator chooses the number of stages (`chosen`), for
    the most stages possible. devices: the number per worker. calm: the stage whose worker needs the most memory while
    no worker is lost, and its bytes by kind on one device. taken_over: the same, perhaps of another stage, if workers
    also run stages of `neighbours` lost neighbours, or their stage for a second pipeline. Raises ValueError for an
    invalid manifest.
    """
    spec = parse_manifest(manifest)
    return result_or_problem(lambda: _check(spec))


def count_layers(manifest: dict[str, Any]) -> dict[str, Any]:
    """Count a task's layers without building them; return {"layers": int} or {"problem": text}. Raises ValueError."""
    spec = parse_manifest(manifest)
    return result_or_problem(lambda: {"layers": len(task_of(spec).layers)})


def result_or_problem(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `look()` returns. If it raises an error of the task or of this machine (ValueError, OSError,
    RuntimeError, MemoryError), return {"problem": one sentence}.
    """
    try:
        return look()
    except ValueError as error:  # a TaskError or DeviceError, or more stages than layers
        return {"problem": one_line(str(error))}
    except (MemoryError, OSError, RuntimeError) as error:
        return {"problem": one_line(f"the task could not be tried: {type(error).__name__}: {error}")}


def _check(spec: JobSpec) -> dict[str, Any]:
    require_toolchain(spec.training, gpu=torch.cuda.is_available())
    task, spec = settled_task(spec)
    initial = spec.task.initial_from
    taken = [] if initial is None else begin_with(initial, task)[1]
    evaluation_schedule(task, spec.training)
    loggers_of(task, spec.training)
    costs = split_costs(task, spec)
    if spec.topology.chooses_stages:
        most = min(most_stages(spec), len(costs) // spec.worker.devices)
        spec = replace(spec, topology=replace(spec.topology, stages=max(most, fewest_stages(spec))))
    stages = layer_ranges(costs, spec.topology, devices=spec.worker.devices)
    parts = device_layers(spec, stages, costs)
    sizes = measure(task, spec)
    try_measurements(task, spec)
    return {
        "initial": taken,
        "layers": len(sizes),
        "parameters": sum(size.parameters - size.tied for size in sizes),
        "stages": [[first, end - 1, sum(size.parameters for size in sizes[first:end])] for first, end in stages],
        "calm": _by_stage(*worker_memory(sizes, stages, spec, taken_over=False, parts=parts)),
        "taken_over": _by_stage(*worker_memory(sizes, stages, spec, taken_over=True, parts=parts)),
        "devices": spec.worker.devices,
        "chosen": spec.topology.chooses_stages,
        "neighbours": min(in_force(spec).redundancy.kept, len(stages) - 1),
    }


def _by_stage(stage: int | None, memory: MemoryByKind) -> dict[str, Any]:
    return {"stage": stage, "memory": asdict(memory)}
