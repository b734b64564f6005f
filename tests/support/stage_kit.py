"""Two small tasks, their training in plain PyTorch, and a chain of stages run in one process."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.frames import Commit
from bamboo_trainer.models import gpt
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.stage.work import Gradients, Work
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig

TEXT = bytes(range(32, 127)) * 60
CONFIG = TrainingConfig(seed=3, precision="fp32", max_gradient_norm=0.5, microbatches=3, micro_batch_size=2)
SPLITS = {1: [(0, 4)], 2: [(0, 2), (2, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


def at(precision: str, config: TrainingConfig = CONFIG, **changes: Any) -> TrainingConfig:
    """Return the configuration with another precision; fp16 also scales losses."""
    return replace(config, precision=precision, **changes)


ROUNDED = at("bf16", parameter_precision="bf16")


def small_gpt(folder: Path, **config: Any) -> Task:
    """Return a small GPT on a text that it writes into the folder."""
    path = folder / "text"
    path.write_bytes(TEXT)
    return gpt.build({"dModel": 16, "heads": 2, "blocks": 2, "context": 8, "text": str(path), **config})


def small_task(**changes) -> Task:
    points = torch.arange(24.0).reshape(12, 2)
    task = Task(
        layers=(lambda: nn.Linear(2, 3), nn.Tanh, lambda: nn.Linear(3, 2)),
        loss=lambda outputs, targets: (outputs[0] - targets[0]).square().mean(),
        dataset=TensorDataset((points / 24,), (points.flip(1) / 24,)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        learning_rate=lambda step: 0.1,
    )
    return replace(task, **changes)


def plain_model(task: Task, seed: int = CONFIG.seed) -> nn.Sequential:
    return nn.Sequential(*(build_layer(task, seed, index) for index in range(len(task.layers))))


def plain_steps(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainingConfig, steps: int
) -> Iterator[tuple[int, float]]:
    """Train a model in plain PyTorch, on the samples of a job with this configuration.

    Yields each step and its loss once the gradients exist. The optimizer steps when the caller asks for the next step.
    """
    for step in range(steps):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        total = 0.0
        for m in range(config.microbatches):
            inputs, targets = task.dataset.batch(config.samples(step, m, task.dataset))
            loss = task.loss((model(inputs if len(inputs) > 1 else inputs[0]),), targets) / config.microbatches
            loss.backward()
            total += float(loss.detach())
        yield step, total
        optimizer.step()


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers, under the names that a job gives them."""
    return {f"layers.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def chain(task: Task, split, config=CONFIG) -> list[Stage]:
    return [build_stage(task, s, split, config) for s in range(len(split))]


@dataclass(frozen=True, slots=True)
class StagesOfTask:
    """A builder of a task's stages; implements `StageBuilder`."""

    task: Task
    config: TrainingConfig = CONFIG

    def stage(self, index: int, stages: Sequence[tuple[int, int]], *, begins: bool = False) -> Stage:
        return build_stage(self.task, index, stages, self.config)


def microbatch(stages: list[Stage], works: list[Work], step: int, index: int) -> list[Gradients | None]:
    """Run one microbatch; return each stage's outputs, then each stage's input gradients, the last stage's first."""
    crossed: list[Gradients | None] = []
    parts: Parts | None = None
    for stage, work in zip(stages, works, strict=True):
        parts = stage.forward(work, step, index, parts)
        crossed.append(parts)
    gradients: Gradients | None = None
    for stage, work in zip(reversed(stages), reversed(works), strict=True):
        if stage is not stages[-1]:
            work.weights |= works[-1].weights
        gradients = stage.backward(work, step, index, gradients)
        crossed.append(gradients)
    return crossed


def begin(stage: Stage, *microbatches: int) -> Work:
    """Begin work on these consecutive microbatches as one group; by default, on all microbatches of a step."""
    chosen = microbatches or tuple(range(CONFIG.microbatches))
    return stage.begin(chosen, (chosen[0], chosen[-1] + 1))


def reduce_tied(stages: list[Stage], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum tied parameters' gradients, in place, over the layers that use them; return each stage's final gradient."""
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for number, (stage, gradient) in enumerate(zip(stages, gradients, strict=True)):
        for segment in stage.values.tied:
            own = [use.layer for use in segment.uses if use.stage == number]
            for layer, place in zip(own, segment.places(number), strict=True):
                pieces[segment.group, layer] = gradient[place].clone()
    for stage, gradient in zip(stages, gradients, strict=True):
        for segment in stage.values.tied:
            total = sum(pieces[segment.group, use.layer].float() for use in segment.uses)
            gradient[segment.offset : segment.offset + segment.size] = total
    return [gradient[: stage.values.size] for stage, gradient in zip(stages, gradients, strict=True)]


def one_step(stages: list[Stage], step: int, config=CONFIG) -> float:
    works = [begin(stage, *range(config.microbatches)) for stage in stages]
    for index in range(config.microbatches):
        microbatch(stages, works, step, index)
    finals = reduce_tied(stages, [work.gradients.total() for work in works])
    squares = [stage.values.squared_norms(final) for stage, final in zip(stages, finals, strict=True)]
    norm = math.sqrt(math.fsum(n for one in squares for n in one.tolist()))
    skipped = config.scales_losses and not math.isfinite(norm)
    commit = Commit(norm=norm, loss=1.0, microbatches=config.microbatches, generation=0, epoch=1, skipped=skipped)
    common = stages[0].values.common_after(commit)
    for stage, gradient in zip(stages, finals, strict=True):
        if skipped:
            stage.values.skip()
        else:
            before = gradient.clone()
            stage.values.apply(gradient, norm)
            assert torch.equal(gradient, before), "frames may hold it"
        stage.values.begin_step(common)
    works[-1].read(works[-1].figures())
    return sum(works[-1].losses[i] for i in range(config.microbatches)) / config.microbatches


def state_of(stages: Iterable[Stage]) -> dict[str, torch.Tensor]:
    """Return CPU copies of parameters (tied ones by each name) and persistent buffers, by "layers.<layer>.<name>"."""
    return {
        f"layers.{index}.{name}": tensor.detach().to("cpu", copy=True)
        for stage in stages
        for index, layer in stage.values.layers.items()
        for name, tensor in layer.state_dict().items()
    }


def whole_state(stage: Stage) -> dict[int, LayerState]:
    """Return copies of the states of the layers that a replica of the stage needs, by layer."""
    return stage.values.layer_states(stage.values.layers_needed(), shown=False)


def state_bytes(stage: Stage) -> tuple[int, int]:
    """Return the bytes of a stage's parameters and buffers, and the bytes of its optimizer state."""
    held, remembered = (
        [tensor for _, tensor in part.named()] for part in (stage.values.parameters, stage.values.optimizer)
    )
    return sum(storages(held).values()), sum(tensor.nbytes for tensor in remembered)


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of these tensors' storages, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
