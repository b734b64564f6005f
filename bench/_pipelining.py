"""The same training on torch.distributed.pipelining (over gloo), one rank of it; optionally checkpointed.

Layers, data, loss and optimizer come from the same task, and the split of layers from the same function.
"""

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from bamboo.job.manifest import parse_manifest
from bamboo.planning.grid import split_layers
from bamboo_trainer.loading import load_task
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.user_code import build_layer, load_batch
from bamboo_trainer.training import TrainingConfig, shown_to_build


def run(
    manifest: dict[str, Any],
    rank: int,
    steps: int,
    folder: str,
    attempt: int = 0,
    every: int = 0,
    zero_bubble: bool = False,
) -> Any:
    """Losses (of the last rank), the ends of the steps, the CPU time until then, and seconds for each checkpoint.

    every: steps between checkpoints, 0 for none. zero_bubble: ScheduleInterleavedZeroBubble with one stage a rank
    (ZB1P) instead of Schedule1F1B.
    Appends to FOLDER/progress-ATTEMPT-RANK: its pid, "ready", and the end of every step.
    """
    torch.set_num_threads(1)
    world, place = parse_manifest(manifest).topology.stages, Path(folder)
    progress = (place / f"progress-{attempt}-{rank}").open("a", buffering=1)
    tell(progress, "pid", os.getpid())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{place}/meet-{attempt}", rank=rank, world_size=world)
    mine = _built(manifest, rank, zero_bubble)
    begin = _load(place, rank, world, mine) if every and attempt else 0
    tell(progress, "ready", begin)
    losses, ends, cpu, saving = [], [], [], []
    for step in range(begin, steps):
        mine.optimizer.zero_grad()
        losses.append(_step(mine, step, rank, world))
        for group in mine.optimizer.param_groups:
            group["lr"] = mine.task.learning_rate(step)
        mine.optimizer.step()
        ends.append(tell(progress, "step", step))
        cpu.append(time.process_time())
        if every and (step + 1) % every == 0:
            _save(place, rank, step + 1, mine)
            saving.append(time.monotonic() - ends[-1])
    dist.destroy_process_group()
    return {"losses": losses, "ends": ends, "cpu": cpu, "saving": saving}


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank trains."""

    task: Task
    config: TrainingConfig
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any


def _built(manifest: dict[str, Any], rank: int, zero_bubble: bool) -> _Rank:
    spec = parse_manifest(manifest)
    training, world = spec.training, spec.topology.stages
    task = load_task(spec.task.entrypoint, spec.task.config, shown_to_build(training))
    first, end = split_layers(layer_costs(task, training.micro_batch_size), world)[rank]
    layers = {i: build_layer(task, training.seed, i) for i in range(first, end)}
    named = [(f"{i}.{name}", p) for i, layer in layers.items() for name, p in layer.named_parameters()]
    module, optimizer = nn.Sequential(*layers.values()), task.optimizer(named)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))

    def loss(out: Tensor, target: Tensor) -> Any:
        return task.loss((out,), (target,))

    schedule: Any
    if zero_bubble:
        schedule = ScheduleInterleavedZeroBubble([stage], training.microbatches, loss_fn=loss)
    else:
        schedule = Schedule1F1B(stage, training.microbatches, loss_fn=loss)
    return _Rank(task, replace(TrainingConfig.of(training), max_gradient_norm=None), module, optimizer, schedule)


def _step(mine: _Rank, step: int, rank: int, world: int) -> float:
    """Samples are drawn as Bamboo draws them: per microbatch, only where they are needed."""
    arguments: list[Tensor] = []
    options: dict[str, Any] = {}
    losses: list[Tensor] = []
    if rank in (0, world - 1):
        task, config = mine.task, mine.config
        length = len(task.dataset)
        batches = [load_batch(task, config.samples(step, m, length)) for m in range(config.microbatches)]
        if rank == 0:
            arguments = [torch.cat([inputs[0] for inputs, _ in batches])]
        if rank == world - 1:
            options = {"target": torch.cat([targets[0] for _, targets in batches]), "losses": losses}
    mine.schedule.step(*arguments, **options)
    return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else 0.0


def tell(progress: Any, event: str, value: int) -> float:
    now = time.monotonic()
    progress.write(json.dumps([event, value, now]) + "\n")
    return now


def _save(place: Path, rank: int, step: int, mine: _Rank) -> None:
    path = place / f"checkpoint-{step}-{rank}"
    torch.save(
        {"module": mine.module.state_dict(), "optimizer": mine.optimizer.state_dict()}, path.with_suffix(".part")
    )
    path.with_suffix(".part").rename(path)


def _load(place: Path, rank: int, world: int, mine: _Rank) -> int:
    """The newest step that every rank has saved; 0, with nothing loaded, if there is none."""
    steps = {int(path.name.split("-")[1]) for path in place.glob("checkpoint-*-0")}
    whole = [s for s in steps if all((place / f"checkpoint-{s}-{r}").exists() for r in range(world))]
    if not whole:
        return 0
    saved = torch.load(place / f"checkpoint-{max(whole)}-{rank}", weights_only=True)
    mine.module.load_state_dict(saved["module"])
    mine.optimizer.load_state_dict(saved["optimizer"])
    return max(whole)
