"""Shared functions of the library's models: reading their config, their optimizers, made-up data, losses of images."""

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
HELD_OUT: Final = 1 << 40  # made-up data for an evaluation begin with this number
TRAINING: Final[dict[str, Any]] = {"learningRate": 1e-3, "warmupSteps": 0, "weightDecay": 0.0, "checkpoint": False}

Named = Iterable[tuple[str, nn.Parameter]]


def read(config: Mapping[str, Any], sizes: Mapping[str, Mapping[str, Any]], default: str) -> dict[str, Any]:
    """Return a size's values by its name, overridden by the config, with its training settings.

    Raises ValueError, naming the key and what was expected.
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
    """Return the number from which data are made up. where: the config's key of the data."""
    known = {"data": 0, "evaluation": HELD_OUT}
    return known[where] if where in known else pure_seed(where)


def whole_numbers(values: Mapping[str, Any], *keys: str) -> None:
    """Raise ValueError, naming the key, unless each value is at least 1."""
    for key in keys:
        if values[key] < 1:
            raise ValueError(f"{key} must be at least 1, got {values[key]}")


def rate(values: Mapping[str, Any], training: TrainingFacts | None, dataset: Dataset) -> Callable[[int], float]:
    """Return a schedule: a linear warm-up, then half a cosine to a tenth of the rate at the job's last step."""
    peak, warmup = values["learningRate"], values["warmupSteps"]
    if peak <= 0:
        raise ValueError(f"learningRate must be positive, got {peak}")
    if training is None:
        return schedules.constant(peak, warmup)
    steps = training.steps_with(dataset, getattr(dataset, "tokens_per_sample", None))
    return schedules.cosine(peak, steps=max(steps, warmup + 1), warmup=warmup, final=0.1 * peak)


def decaying(named: Named, decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups, without empty ones: matrices decay, norms and biases do not."""
    parameters = [p for _, p in named]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(values: Mapping[str, Any], named: Named) -> torch.optim.Optimizer:
    """Return AdamW with the settings that `read` returns."""
    return torch.optim.AdamW(decaying(named, values["weightDecay"]), lr=values["learningRate"], betas=(0.9, 0.95))


def sgd(values: Mapping[str, Any], named: Named) -> torch.optim.Optimizer:
    """Return SGD with the settings that `read` returns."""
    return torch.optim.SGD(decaying(named, values["weightDecay"]), lr=values["learningRate"], momentum=0.9)


MakeUp = Callable[[int, int], Dataset]  # how many samples, and the number that the first one is made from


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
    """Return what `training.evaluation` measures, loss and accuracy, if the config has a key `evaluation`."""
    if config is None:
        return None
    return Evaluation(dataset=opened(config), metrics={"accuracy": accuracy})


def top1(outputs: Parts, targets: Parts) -> tuple[Tensor, int]:
    """Return the number of images whose class has the highest logit, and the number of images. logits: [samples,
    classes].
    """
    return (outputs[0].argmax(-1) == targets[0]).sum(), len(targets[0])


def data_of(c: Mapping[str, Any], made_up: MakeUp, accuracy: Metric) -> dict[str, Any]:
    """Return `dataset` and `evaluation` of a task. c: its config from `read`."""

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
    """Sample i is noise, brighter in one colour by its class: float32 [samples, 3, side, side]; int64 [samples]."""

    samples: int
    side: int
    classes: int
    first: int = 0  # the number that the first one is made from

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
    """[batch, channels, h, w] -> [batch, channels * side * side], averaged to that side."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.side).flatten(1)


def numbers(c: Mapping[str, Any], key: str, count: str, example: str) -> list[int]:
    """Return the whole numbers, at least 1, in the config's text, as many as in the example. count: a word for that.

    Raises ValueError, naming the key and what was expected.
    """
    words = c[key].split()
    values = [int(word) for word in words if word.isdecimal()]
    if not len(values) == len(words) == len(example.split()) or min(values) < 1:
        raise ValueError(f'{key} must be {count} numbers such as "{example}", got {c[key]!r}')
    return values


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])
