"""The same training in one process, in plain PyTorch: what the distributed result is compared with."""

import torch
from torch import Tensor, nn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.mixed_precision import autocast
from bamboo_trainer.tasks.running_buffers import Capture, apply_at_once, capturing
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, forward_seed, load_batch, seed_forward, task_loss
from bamboo_trainer.training import TrainingConfig


def train(task: Task, config: TrainingConfig, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The mean loss of each step, and the final state by "layers.<layer>.<name>"."""
    layers = [build_layer(task, config.seed, i) for i in range(len(task.layers))]
    firsts = tie(dict(enumerate(layers)), tied_groups(task), task, config.seed)
    model = nn.ModuleList(layers)
    # A tied parameter goes by its group's first name, as everywhere.
    named = [(firsts.get(id(p), (0, name))[1], p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = ScheduledOptimizer(task, named)
    losses = []
    for step in range(steps):
        model.zero_grad()
        capture = Capture()  # what is declared keeps its values during a step
        with capturing(capture):
            step_losses = [_microbatch(task, config, layers, step, m) for m in range(config.microbatches)]
        if config.max_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], config.max_gradient_norm)
        optimizer.step(step)
        for module, given in capture.take():
            apply_at_once(module, given)
        losses.append(sum(step_losses) / len(step_losses))
    state = {
        f"layers.{i}.{name}": tensor.detach().clone()
        for i, layer in enumerate(layers)
        for name, tensor in layer.state_dict().items()
    }
    return losses, state


def _microbatch(task: Task, config: TrainingConfig, layers: list[nn.Module], step: int, microbatch: int) -> float:
    parts, targets = load_batch(task, config.samples(step, microbatch, len(task.dataset)))
    for index, layer in enumerate(layers):
        seed_forward(torch.device("cpu"), forward_seed(config.seed, step, microbatch, index))
        with autocast(torch.device("cpu"), config.precision):
            result = call_layer(layer, parts[0] if len(parts) == 1 else parts)
        parts = (result,) if isinstance(result, Tensor) else result
    loss = task_loss(task, parts, targets)
    (loss / config.microbatches).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
