"""Reference training: a job in one process in plain PyTorch, for comparisons with distributed results."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer import loss_scale
from bamboo_trainer.decisions import Committed
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.evaluation import frozen_among, next_decided
from bamboo_trainer.tasks.mixed_precision import autocast, kept_in_fp32, passed_on
from bamboo_trainer.tasks.running_buffers import Capture, capturing
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import (
    build_layer,
    call_layer,
    forward_seed,
    load_batch,
    run_layer,
    seed_forward,
    task_loss,
)
from bamboo_trainer.training import TrainingConfig, loss_unit


def train(task: Task, config: TrainingConfig, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train for `steps` steps, or until a decision of the task stops the training. Return each step's mean loss, and
    the state by "layers.<layer>.<name>". The decisions get neither metrics nor evaluations.
    """
    layers = [build_layer(task, config.seed, i) for i in range(len(task.layers))]
    firsts = tie(dict(enumerate(layers)), tied_groups(task), task, config.seed)
    model = nn.ModuleList(layers)
    # A tied parameter goes by its group's first name, as everywhere.
    named = [(firsts.get(id(p), (0, name))[1], p) for name, p in model.named_parameters() if p.requires_grad]
    precise = kept_in_fp32(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in precise else config.parameter_dtype)
        parameter.grad_dtype = torch.float32
    optimizer = ScheduledOptimizer(task, named)
    optimizer.fuse()
    scaler = _scaler(config)
    losses: list[float] = []
    decided = next_decided(task, None, Committed(step=0))
    for step in range(steps):
        if decided and decided.stops:
            break
        optimizer.factor = decided.learning_rate if decided else 1.0
        frozen = frozen_among([name for name, _ in named], decided)
        model.zero_grad()
        done = [_microbatch(task, config, layers, (step, m), scaler) for m in range(config.microbatches)]
        whole = sum(one.weight for one in done) or math.nan
        stepping, scale = _OneStep(optimizer, step), scaler.get_scale()
        if scaler.is_enabled():
            scaler.unscale_(stepping)  # type: ignore[arg-type]
        for gradient in [p.grad for _, p in named if done[0].weighted]:
            if gradient is not None:
                gradient /= whole / loss_unit(task, config)
        for _, parameter in [one for one in named if one[0] in frozen]:
            parameter.grad = None
        if config.max_gradient_norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], config.max_gradient_norm)
        scaler.step(stepping)  # type: ignore[arg-type]
        scaler.update()
        skipped = scaler.get_scale() < scale
        losses.append(sum(one.total for one in done) / whole)
        decided = next_decided(task, decided, _committed(step + 1, losses[-1], float(norm), skipped))
    state = {
        f"layers.{i}.{name}": tensor.detach().clone()
        for i, layer in enumerate(layers)
        for name, tensor in layer.state_dict().items()
    }
    return losses, state


def _committed(step: int, loss: float, norm: float, skipped: bool) -> Committed:
    finite = math.isfinite
    return Committed(
        step=step, loss=loss if finite(loss) else None, gradient_norm=norm if finite(norm) else None, skipped=skipped
    )


def _scaler(config: TrainingConfig) -> torch.amp.GradScaler:
    """Return torch's GradScaler, disabled if the precision does not scale losses."""
    if not config.scales_losses:
        return torch.amp.GradScaler("cpu", enabled=False)
    return torch.amp.GradScaler("cpu", init_scale=loss_scale.INITIAL, growth_interval=loss_scale.GROWTH_INTERVAL)


class _OneStep:
    """An adapter by which a GradScaler calls one step of a ScheduledOptimizer."""

    def __init__(self, optimizer: ScheduledOptimizer, version: int) -> None:
        self._optimizer, self._version = optimizer, version
        self.param_groups = optimizer.inner.param_groups if optimizer.inner else []

    def step(self) -> None:
        """Step with gradients cast to the parameters' dtype, as optimizers require, and drop the gradients."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._optimizer.step(self._version)
        for parameter in parameters:
            parameter.grad, parameter.grad_dtype = None, torch.float32


@dataclass(frozen=True, slots=True)
class _Done:
    """The loss of a microbatch."""

    total: float  # its loss and what layers add, times its weight
    weight: float  # 1 if the loss is a mean
    weighted: bool


def _microbatch(
    task: Task, config: TrainingConfig, layers: list[nn.Module], place: tuple[int, int], scaler: torch.amp.GradScaler
) -> _Done:
    """Run forward and backward of a microbatch, and return its loss. place: step and microbatch."""
    step, microbatch = place
    parts, targets = load_batch(task, config.samples(step, microbatch, task.dataset))
    capture = Capture()
    for index, layer in enumerate(layers):
        seed_forward(torch.device("cpu"), forward_seed(config.seed, step, microbatch, index))
        with autocast(torch.device("cpu"), config.precision), capturing(capture):
            dtype = config.boundary_dtype if index < len(layers) - 1 else torch.float32
            call = partial(_layer_and_rounding, layer, dtype)
            parts = run_layer(layer, index, parts, call)  # with dropout's masks on the layout that they have in a job
    capture.close()
    loss, weight = task_loss(task, parts, targets)
    share = 1.0 if weight is None else weight
    for _, value in capture.losses:
        loss = loss + share * value
    if loss.requires_grad:
        share_of_step = loss / (config.microbatches if weight is None else loss_unit(task, config))
        scaler.scale(share_of_step).backward()  # type: ignore[no-untyped-call]
    return _Done(float(loss.detach()), share, weight is not None)


def _layer_and_rounding(layer: nn.Module, dtype: torch.dtype, given: Any) -> Any:
    return passed_on(call_layer(layer, given), dtype)
