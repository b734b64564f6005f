"""A training in one process as anybody would write it in PyTorch: what `bamboo bench` sets Bamboo's throughput beside.

`bamboo_trainer.reference` is what its bits are set beside: that repeats in one process what makes them independent of
the grid, which takes time. Here is nothing of it. Samples, first weights, the optimizer and its rates are the job's.
"""

import time
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_trainer.check import found_or_problem
from bamboo_trainer.compilation.toolchain import require_toolchain
from bamboo_trainer.loading import settled_task
from bamboo_trainer.memory.placement import choose_device, use, wait_for
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection.operations import UNCOUNTED
from bamboo_trainer.tasks.mixed_precision import autocast
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, load_batch, task_loss
from bamboo_trainer.training import TrainingConfig

WORKER: Final = "plain-0"


def train_plainly(manifest: dict[str, Any], warmup: int, least: int, seconds: float) -> dict[str, Any]:
    """Trains as many steps as the manifest says, or ends earlier, when at least `warmup` and `least` steps are done
    and these took so many seconds. The answer has `problem`, one sentence, or what was measured; only JSON values.

    steps: seconds of each step after the first `warmup` ones. losses: of every step, the mean of its microbatches.
    flops: floating point operations of a sample, forward and backward, as torch counts them. memory: bytes of the
    device that torch held at most; None on a CPU.
    """
    torch.set_num_threads(1)  # as in a worker
    spec = parse_manifest(manifest)
    return found_or_problem(lambda: _train(spec, warmup, least, seconds), (MemoryError, OSError, RuntimeError))


def _train(spec: JobSpec, warmup: int, least: int, seconds: float) -> dict[str, Any]:
    device = choose_device(WORKER)
    use(device, deterministic=spec.training.deterministic)
    require_toolchain(spec.training, gpu=device.type == "cuda")
    task, spec = settled_task(spec)
    model = _Model(task, TrainingConfig.of(spec.training), device)
    flops = model.count_flops()
    if spec.training.compile:
        model.compile()
    ends, losses = [time.perf_counter()], list[float]()
    for step in range(spec.training.steps):
        losses.append(model.train(step))
        ends.append(time.perf_counter())
        if step + 1 >= warmup + least and ends[-1] - ends[warmup] >= seconds:
            break
    return {
        "steps": [ends[i + 1] - ends[i] for i in range(warmup, len(losses))],
        "losses": losses,
        "flops": flops,
        "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


class _Model:
    """The layers one after the other on one device, and their optimizer."""

    def __init__(self, task: Task, config: TrainingConfig, device: torch.device) -> None:
        self._task, self._config, self._device = task, config, device
        layers = [build_layer(task, config.seed, index) for index in range(len(task.layers))]
        tie(dict(enumerate(layers)), tied_groups(task), task, config.seed)
        self._layers = nn.ModuleList(layers).to(device)
        named = [(name, one) for name, one in self._layers.named_parameters() if one.requires_grad]
        self._optimizer = ScheduledOptimizer(task, named)
        self._optimizer.fuse()

    def compile(self) -> None:
        for layer in self._layers:
            layer.compile()

    def train(self, step: int) -> float:
        """Does a step, and returns its loss."""
        self._layers.zero_grad()
        losses = [self._microbatch(step, microbatch) for microbatch in range(self._config.microbatches)]
        self._optimizer.step(step)
        wait_for(self._device)
        return float(torch.stack(losses).mean())

    def count_flops(self) -> float:
        """The operations of a sample, counted in a microbatch whose gradients nobody uses."""
        with FlopCounterMode(display=False, custom_mapping=dict(UNCOUNTED)) as counter:
            self._microbatch(0, 0)
        self._layers.zero_grad()
        return float(counter.get_total_flops()) / self._config.micro_batch_size

    def _microbatch(self, step: int, microbatch: int) -> Tensor:
        """Adds a microbatch's gradients up, and returns its mean loss."""
        inputs, targets = (
            tuple(part.to(self._device, non_blocking=True) for part in parts)
            for parts in load_batch(self._task, self._config.samples(step, microbatch, self._task.dataset))
        )
        with autocast(self._device, self._config.precision):
            loss, weight = task_loss(self._task, self._outputs(inputs), targets)
        mean = loss / (1.0 if weight is None else weight)
        (mean / self._config.microbatches).backward()  # type: ignore[no-untyped-call]
        return mean.detach()

    def _outputs(self, inputs: Parts) -> Parts:
        given: Any = inputs[0] if len(inputs) == 1 else inputs
        for layer in self._layers:
            given = call_layer(layer, given)
        return given if isinstance(given, tuple) else (given,)
