"""One rank of a training with torch.distributed.pipelining (over gloo), for comparison with Bamboo. It trains the task
of Bamboo's workers (layers, data, loss and optimizer), with layers split by Bamboo's `split_layers`.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
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
from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.scheduled_optimizer import fuse
from bamboo_trainer.tasks.user_code import build_layer, load_batch
from bamboo_trainer.training import TrainingConfig, shown_to_build

NORMS = 4  # steps whose gradient norm is computed without clipping


class TorchSchedule(StrEnum):
    """torch's schedules. ZB1P: ScheduleInterleavedZeroBubble, one stage per rank. ZBV: two stages per rank."""

    ONE_F_ONE_B = "1F1B"
    ZB1P = "ZB1P"
    ZBV = "ZBV"

    def stages(self, rank: int, world: int) -> list[int]:
        """Return the numbers of a rank's stages, which follow the order of the layers. world: the number of ranks."""
        return [rank, 2 * world - 1 - rank] if self is TorchSchedule.ZBV else [rank]

    def made(self, stages: list[Any], microbatches: int, loss: Callable[[Tensor, Tensor], Any]) -> Any:
        match self:
            case TorchSchedule.ONE_F_ONE_B:
                return Schedule1F1B(stages[0], microbatches, loss_fn=loss)
            case TorchSchedule.ZBV:
                return ScheduleZBVZeroBubble(stages, microbatches, loss_fn=loss)
            case _:
                return ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=loss)


def run(manifest: dict[str, Any], rank: int, folder: str, schedule: str) -> Any:
    """Train one rank and return its figures.

    losses: by step, on the last stage's rank only. ends, cpu: monotonic time and CPU seconds at each step's end. norms:
    this rank's squared gradient norms (of the first NORMS steps, or of all with clipping). in_flight: the most
    microbatches whose activations it keeps, in units of all its layers. folder: for all ranks' rendezvous.
    """
    torch.set_num_threads(1)
    spec = parse_manifest(manifest)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=spec.topology.stages)
    mine = built(manifest, rank, TorchSchedule(schedule))
    losses, ends, cpu, norms = [], [], [], []
    for step in range(spec.training.steps):
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
        ends.append(time.monotonic())
        cpu.append(time.process_time())
    dist.destroy_process_group()
    in_flight = _in_flight(mine.schedule.pipeline_order[rank]) / len(mine.stages)
    return {"losses": losses, "ends": ends, "cpu": cpu, "norms": norms, "in_flight": in_flight}


def _in_flight(order: Sequence[Any]) -> int:
    """Return the most microbatches whose activations a rank keeps at a time, summed over its stages."""
    flying = most = 0
    for action in filter(None, order):
        flying += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(action.computation_type.name, 0)
        most = max(most, flying)
    return most


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's stages, with their optimizer and schedule."""

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
    """Run one step's forwards and backwards; return [mean loss] if this rank has the last stage, else []. Ranks with
    the first or last stage draw the samples of each microbatch as Bamboo does.
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
    """Clip gradients to the norm `most` over all ranks. Return this rank's part of the squared norm before clipping."""
    parameters = [p for p in mine.module.parameters() if p.grad is not None]
    own = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    total = own.clone()
    dist.all_reduce(total)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total.sqrt())
    return float(own)
