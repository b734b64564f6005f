"""What the running statistics of BatchNorm cost, which are captured, folded and set at the commit."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from bamboo_trainer.models import resnet
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.training import TrainingConfig

MICROBATCHES, SAMPLES, SIDE = 4, 4, 64


def compare(rounds: int) -> tuple[float, float, int]:
    """Seconds of CPU time of a step of a ResNet-50 in one stage, the least of some: with running statistics, and with
    BatchNorms that keep none; and the bytes that a pipeline sends for them. Both normalize in the same way.
    """
    torch.set_num_threads(1)
    stages = [_stage(tracked=True), _stage(tracked=False)]
    taken: list[list[float]] = [[], []]
    for _ in range(rounds):
        for stage, seconds in zip(stages, taken, strict=True):
            began = time.process_time()
            _step(stage)
            seconds.append(time.process_time() - began)
    return min(taken[0][1:]), min(taken[1][1:]), stages[0].values.final.running_size * MICROBATCHES


def _stage(*, tracked: bool) -> Stage:
    task = resnet.build({"size": "50", "side": SIDE})
    if not tracked:
        task = replace(task, layers=tuple(partial(_untracked, factory) for factory in task.layers))
    config = TrainingConfig(
        seed=0,
        precision="fp32",
        max_gradient_norm=None,
        microbatches=MICROBATCHES,
        micro_batch_size=SAMPLES,
        deterministic=False,
    )
    return build_stage(task, 0, [(0, len(task.layers))], config)


def _untracked(factory: Callable[[], nn.Module]) -> nn.Module:
    layer = factory()
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                module.register_buffer(name, None)
    return layer


def _step(stage: Stage) -> None:
    work = stage.begin(range(MICROBATCHES), range(MICROBATCHES + 1))
    for microbatch in range(MICROBATCHES):
        stage.forward(work, stage.values.version, microbatch, None)
        stage.backward(work, stage.values.version, microbatch, None)
    running = stage.values.final.folded(work.contributions) if stage.values.final.running_size else ()
    stage.values.apply(work.gradients.total()[: stage.values.final.size], 1.0, *running)
