"""A job's training on torch.distributed.pipelining (over gloo), one rank of it; optionally with checkpoints. Layers,
data, loss and optimizer come from the same task, and the split of layers from the same function.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.grid import split_layers
from bamboo_trainer.loading import load_task
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.scheduled_optimizer import fuse
from bamboo_trainer.tasks.user_code import build_layer, load_batch
from bamboo_trainer.training import TrainingConfig, shown_to_build

NORMS = 4  # steps whose gradient norm is computed without clipping


class TorchSchedule(StrEnum):
    """torch's schedules. ZB1P: ScheduleInterleavedZeroBubble with one stage per rank; it and ZBV have two of half the
    size.
    """

    ONE_F_ONE_B = "1F1B"
    ZB1P = "ZB1P"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZBV = "ZBV"

    def stages(self, rank: int, world: int) -> list[int]:
        """Return the stages of that rank, numbered in the order of the layers."""
        match self:
            case TorchSchedule.INTERLEAVED_ZERO_BUBBLE:
                return [rank, world + rank]
            case TorchSchedule.ZBV:
                return [rank, 2 * world - 1 - rank]
            case _:
                return [rank]

    def made(self, stages: list[Any], microbatches: int, loss: Callable[[Tensor, Tensor], Any]) -> Any:
        match self:
            case TorchSchedule.ONE_F_ONE_B:
                return Schedule1F1B(stages[0], microbatches, loss_fn=loss)
            case TorchSchedule.ZBV:
                return ScheduleZBVZeroBubble(stages, microbatches, loss_fn=loss)
            case _:
                return ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=loss)


def run(
    manifest: dict[str, Any],
    rank: int,
    steps: int,
    folder: str,
    attempt: int = 0,
    every: int = 0,
    schedule: str = TorchSchedule.ONE_F_ONE_B,
) -> Any:
    """Train and return figures of this rank.

    These are the losses (on the last stage's rank), the ends of the steps, the CPU time until then, the seconds of each
    checkpoint, the squared norms of this rank's gradients (of the first steps, or of all with clipping), and the most
    microbatches whose activations it keeps, in units of all its layers. every: steps between checkpoints, 0 for none.
    Appends to FOLDER/progress-ATTEMPT-RANK: its pid, "ready", and the end of every step.
    """
    torch.set_num_threads(1)
    world, place = parse_manifest(manifest).topology.stages, Path(folder)
    progress = (place / f"progress-{attempt}-{rank}").open("a", buffering=1)
    tell(progress, "pid", os.getpid())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{place}/meet-{attempt}", rank=rank, world_size=world)
    mine = built(manifest, rank, TorchSchedule(schedule))
    begin = _load(place, rank, world, mine) if every and attempt else 0
    tell(progress, "ready", begin)
    losses, ends, cpu, saving, norms = [], [], [], [], []
    for step in range(begin, steps):
        mine.optimizer.zero_grad()
        losses += train_step(mine, step)
        if mine.config.max_gradient_norm is not None:
            norms.append(_clip(mine, mine.config.max_gradient_norm))
        elif step < NORMS:
            gradients = [p.grad for p in mine.module.parameters() if p.grad is not None]
            norms.append(sum(float(gradient.double().square().sum()) for gradient in gradients))
        for group in mine.optimizer.param_groups:
            group["lr"] = mine.task.learning_rate(step)
        mine.optimizer.step()
        ends.append(tell(progress, "step", step))
        cpu.append(time.process_time())
        if every and (step + 1) % every == 0:
            _save(place, rank, step + 1, mine)
            saving.append(time.monotonic() - ends[-1])
    dist.destroy_process_group()
    in_flight = _in_flight(mine.schedule.pipeline_order[rank]) / len(mine.stages)
    return {
        "losses": losses,
        "ends": ends,
        "cpu": cpu,
        "saving": saving,
        "norms": norms,
        "in_flight": in_flight,
    }


def _in_flight(order: Sequence[Any]) -> int:
    """Return the most microbatches whose activations a rank keeps at a time, summed over its stages."""
    flying = most = 0
    for action in filter(None, order):
        flying += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(action.computation_type.name, 0)
        most = max(most, flying)
    return most


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank trains."""

    task: Task
    config: TrainingConfig
    module: nn.Module
    optimizer: torch.optim.Optimizer
    stages: list[PipelineStage]
    schedule: Any


def built(manifest: dict[str, Any], rank: int, schedule: TorchSchedule) -> Rank:
    spec = parse_manifest(manifest)
    training, world = spec.training, spec.topology.stages
    task = load_task(spec.task.entrypoint, spec.task.config, shown_to_build(training))
    numbers = schedule.stages(rank, world)
    count = world * len(numbers)
    split = split_layers(layer_costs(task, training.micro_batch_size), count)
    layers = [{i: build_layer(task, training.seed, i) for i in range(*split[number])} for number in numbers]
    named = [(f"{i}.{name}", p) for one in layers for i, layer in one.items() for name, p in layer.named_parameters()]
    modules, optimizer = [nn.Sequential(*one.values()) for one in layers], task.optimizer(named)
    fuse(optimizer)
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]

    def loss(out: Tensor, target: Tensor) -> Any:
        return task.loss((out,), (target,))

    made = schedule.made(stages, training.microbatches, loss)
    return Rank(task, TrainingConfig.of(training), nn.ModuleList(modules), optimizer, stages, made)


def train_step(mine: Rank, step: int) -> list[float]:
    """Train one step; return the loss on the last stage. Samples are drawn as in Bamboo: per microbatch, where
    needed.
    """
    arguments: list[Tensor] = []
    options: dict[str, Any] = {}
    losses: list[Tensor] = []
    first, last = any(stage.is_first for stage in mine.stages), any(stage.is_last for stage in mine.stages)
    if first or last:
        task, config = mine.task, mine.config
        batches = [load_batch(task, config.samples(step, m, task.dataset)) for m in range(config.microbatches)]
        if first:
            arguments = [torch.cat([inputs[0] for inputs, _ in batches])]
        if last:
            options = {"target": torch.cat([targets[0] for _, targets in batches]), "losses": losses}
    mine.schedule.step(*arguments, **options)
    return [sum(float(loss.detach()) for loss in losses) / len(losses)] if last else []


def _clip(mine: Rank, most: float) -> float:
    """Clip gradients by their norm over all ranks; return this rank's part of its square."""
    parameters = [p for p in mine.module.parameters() if p.grad is not None]
    own = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    total = own.clone()
    dist.all_reduce(total)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total.sqrt())
    return float(own)


def tell(progress: Any, event: str, value: int) -> float:
    now = time.monotonic()
    progress.write(json.dumps([event, value, now]) + "\n")
    return now


def _save(place: Path, rank: int, step: int, mine: Rank) -> None:
    path = place / f"checkpoint-{step}-{rank}"
    torch.save(
        {"module": mine.module.state_dict(), "optimizer": mine.optimizer.state_dict()}, path.with_suffix(".part")
    )
    path.with_suffix(".part").rename(path)


def _load(place: Path, rank: int, world: int, mine: Rank) -> int:
    """Load the newest step that every rank has saved and return it; 0, with nothing loaded, if there is none."""
    steps = {int(path.name.split("-")[1]) for path in place.glob("checkpoint-*-0")}
    whole = [s for s in steps if all((place / f"checkpoint-{s}-{r}").exists() for r in range(world))]
    if not whole:
        return 0
    saved = torch.load(place / f"checkpoint-{max(whole)}-{rank}", weights_only=True)
    mine.module.load_state_dict(saved["module"])
    mine.optimizer.load_state_dict(saved["optimizer"])
    return max(whole)
