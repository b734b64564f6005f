"""Code shared by the ready-made models: config, optimizers, schedules, made-up data, and image classification."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer import schedules
from bamboo_trainer.data import dataset_from, pure_seed
from bamboo_trainer.data.config_keys import require_known, typed
from bamboo_trainer.task import Dataset, Evaluation, Metric, Parts, Task, TrainingFacts

MADE_UP: Final = "random"
HELD_OUT: Final = 1 << 40  # the first seed of made-up data for an evaluation
TRAINING: Final[dict[str, Any]] = {"learningRate": 1e-3, "warmupSteps": 0, "weightDecay": 0.0, "checkpoint": False}

Named = Iterable[tuple[str, nn.Parameter]]


def read(config: Mapping[str, Any], sizes: Mapping[str, Mapping[str, Any]], default: str) -> dict[str, Any]:
    """Return a model's settings: the preset `size`, with the defaults of `TRAINING`, overridden by the config.

    sizes: the presets by name. default: the name used if the config has no `size`. Raises ValueError, naming the key
    and what was expected.
    """
    size = config.get("size", default)
    if size not in sizes:
        raise ValueError(f"size must be one of {', '.join(sizes)}, got {size!r}")
    known = {**TRAINING, **sizes[size], "data": {}, "evaluation": {}}
    require_known(config, {"size": size, **known})
    kinds = {"size": str, **{key: Mapping if default == {} else type(default) for key, default in known.items()}}
    values = {key: typed(key, value, kinds[key]) for key, value in config.items()}
    for key, value in values.items():
        if type(value) in (int, float) and value < 0:
            raise ValueError(f"{key} must not be negative, got {value}")
    return {**known, "evaluation": None, **values}


def made_up_seed(where: str) -> int:
    """Return the first seed of made-up data. where: the config's key of the data, each of which gives other data."""
    known = {"data": 0, "evaluation": HELD_OUT}
    return known[where] if where in known else pure_seed(where)


def whole_numbers(values: Mapping[str, Any], *keys: str) -> None:
    """Raise ValueError, naming the key, unless each value is at least 1."""
    for key in keys:
        if values[key] < 1:
            raise ValueError(f"{key} must be at least 1, got {values[key]}")


def rate(values: Mapping[str, Any], training: TrainingFacts | None, dataset: Dataset) -> Callable[[int], float]:
    """Return a learning rate schedule: linear warm-up, then cosine decay to a tenth of the rate at the job's last step;
    constant after the warm-up if `training` is None. values: from `read`. Raises ValueError for a rate of 0.
    """
    peak, warmup = values["learningRate"], values["warmupSteps"]
    if peak <= 0:
        raise ValueError(f"learningRate must be positive, got {peak}")
    if training is None:
        return schedules.constant(peak, warmup)
    steps = training.steps_with(dataset, getattr(dataset, "tokens_per_sample", None))
    return schedules.cosine(peak, steps=max(steps, warmup + 1), warmup=warmup, final=0.1 * peak)


def decaying(named: Named, decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, with weight decay for matrices and without it for norms and biases. Empty
    groups are left out.
    """
    parameters = [p for _, p in named]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(values: Mapping[str, Any], named: Named) -> torch.optim.Optimizer:
    """Return AdamW. values: the settings from `read`. named: parameters by name."""
    return torch.optim.AdamW(decaying(named, values["weightDecay"]), lr=values["learningRate"], betas=(0.9, 0.95))


def sgd(values: Mapping[str, Any], named: Named) -> torch.optim.Optimizer:
    """Return SGD with a momentum of 0.9. values: the settings from `read`. named: parameters by name."""
    return torch.optim.SGD(decaying(named, values["weightDecay"]), lr=values["learningRate"], momentum=0.9)


MakeUp = Callable[[int, int], Dataset]  # (number of samples, seed of the first one) -> dataset


def open_data(config: Mapping[str, Any], made_up: MakeUp, where: str = "data") -> Dataset:
    """Open the dataset that a config describes.

    config: {"kind": "random", "samples": 512} is made-up data, and the default; for the other kinds see
    `bamboo_trainer.data.dataset_from`. where: the config's key; made-up data for an evaluation are other samples.
    """

    def make(*, where: str, samples: int = 512) -> Dataset:
        whole_numbers({"samples": samples}, "samples")
        return made_up(samples, made_up_seed(where))

    return dataset_from({"kind": MADE_UP, **config}, where, {MADE_UP: make})


def evaluation(
    config: Mapping[str, Any] | None,
    opened: Callable[[Mapping[str, Any]], Dataset],
    accuracy: Metric,
) -> Evaluation | None:
    """Return a task's evaluation, with the metric accuracy; None if there is no config. config: of the data, which
    `opened` opens.
    """
    if config is None:
        return None
    return Evaluation(dataset=opened(config), metrics={"accuracy": accuracy})


def top1(outputs: Parts, targets: Parts) -> tuple[Tensor, int]:
    """Return the number of images whose class has the highest logit, and the number of images. outputs: logits
    [samples, classes].
    """
    return (outputs[0].argmax(-1) == targets[0]).sum(), len(targets[0])


def data_of(c: Mapping[str, Any], made_up: MakeUp, accuracy: Metric) -> dict[str, Any]:
    """Return the arguments `dataset` and `evaluation` of a `Task`. c: its settings from `read`."""

    def held_out(config: Mapping[str, Any]) -> Dataset:
        return open_data(config, made_up, "evaluation")

    return {"dataset": open_data(c["data"], made_up), "evaluation": evaluation(c["evaluation"], held_out, accuracy)}


def classifier(layers: Sequence[Callable[[], nn.Module]], c: Mapping[str, Any], training: TrainingFacts | None) -> Task:
    """Return the task of a model that classifies images. layers: the last one returns logits [samples, classes]. c: its
    config from `read`. Raises ValueError for invalid data.
    """
    data = data_of(c, lambda samples, first: MadeUpImages(samples, c["side"], c["classes"], first), top1)
    return Task(
        layers=layers,
        loss=_loss,
        optimizer=partial(sgd, c),
        learning_rate=rate(c, training, data["dataset"]),
        **data,
    )


@dataclass(frozen=True, slots=True)
class MadeUpImages:
    """Made-up images of noise, in which the class decides the colour that is brighter, and how much.

    Inputs: float32 [samples, 3, side, side]. Targets: int64 [samples].
    """

    samples: int
    side: int
    classes: int
    first: int = 0  # the seed of sample 0; sample i has first + i

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        indices = [self.first + index for index in indices]
        labels = torch.tensor([pure_seed("label", i) % self.classes for i in indices])
        images = []
        for index, label in zip(indices, labels.tolist(), strict=True):
            generator = torch.Generator().manual_seed(pure_seed("image", index))
            image = torch.randn(3, self.side, self.side, generator=generator)
            image[label % 3] += 1 + label // 3 / max(1, self.classes // 3)
            images.append(image)
        return (torch.stack(images),), (labels,)


class Flat(nn.Module):
    """Adaptive average pooling, then flattening: [batch, channels, h, w] -> [batch, channels * side * side]."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.side).flatten(1)


def numbers(c: Mapping[str, Any], key: str, count: str, example: str) -> list[int]:
    """Parse a setting of several whole numbers, separated by spaces and at least 1, as many as in the example.

    c: settings from `read`. count: the number of numbers, as a word. Raises ValueError, naming the key.
    """
    words = c[key].split()
    values = [int(word) for word in words if word.isdecimal()]
    if not len(values) == len(words) == len(example.split()) or min(values) < 1:
        raise ValueError(f'{key} must be {count} numbers such as "{example}", got {c[key]!r}')
    return values


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])
