"""Learning from preferences (DPO, Rafailov et al., 2023): of two answers to the same, the one that was liked better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset, by_source, dataset_from, source_names
from bamboo_trainer.data.config import Opener
from bamboo_trainer.data.prefetched import readers_of
from bamboo_trainer.models.parts import settings
from bamboo_trainer.models.parts.reference_model import with_reference
from bamboo_trainer.models.parts.sequences import IGNORED, Padding, check_tokens, trimmed_width, whole_number
from bamboo_trainer.task import Dataset, Evaluation, Metric, Parts, Task

Preference = Literal["preference"]
NAMES: Final = ("input_ids", "attention_mask", "labels")
MADE_UP: Final = {"length": 32, "samples": 512}


class Preferences:
    """Inputs: int64 [samples, 2, length] token ids of the answer that was liked better and the other one, each behind
    what was asked; a mask of those that count; and the token that follows each, -100 where it is of no answer. No
    targets.

    source: has the first two as inputs, the labels as its target; shift: these are the tokens themselves. words: size
    of the vocabulary. where: the config's key, for messages. padding, mixed: as of `Sequences`.
    """

    names, masked = NAMES, True
    tokens_per_sample: int | None = None

    def __init__(
        self, source: Dataset, words: int, shift: bool, where: str, *, padding: Padding, mixed: bool = False
    ) -> None:
        self._source, self._words, self._shift, self._where = source, words, shift, where
        self._padding, self._mixed = padding, mixed
        given, targets = source.batch([0])
        shapes = {tuple(part.shape[1:]) for part in (*given, *targets[:1])}
        if len(given) != 2 or len(targets) - mixed != 1 or len(shapes) != 1 or given[0].shape[1:-1] != (2,):
            raise ValueError(
                f"{where}: expected tokens and a mask [samples, 2, length] as inputs and labels of this shape as "
                f"target, got inputs {[list(part.shape) for part in given]} and targets "
                f"{[list(part.shape) for part in targets]}"
            )
        self.length = int(given[0].shape[-1])
        self.order = padding.order(source, True, where)
        self.prefetched = readers_of(source)

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Raises ValueError for a token outside of the vocabulary."""
        (ids, mask), (labels, *more) = self._source.batch(indices)
        check_tokens(ids, self._words, self._where)
        if self._shift:
            labels = torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORED)], dim=-1)
        width = trimmed_width(mask, self._padding.trim)
        return tuple(part.long()[..., :width].contiguous() for part in (ids, mask, labels)), tuple(more)


def open_preferences(config: Mapping[str, Any], words: int, where: str, kinds: Mapping[str, Opener]) -> Preferences:
    """The pairs that a config describes. config: {"kind": "random", "length", "samples"} are made up, and the default;
    the other kinds are those of `bamboo_trainer.data.dataset_from`, and `kinds`. Raises ValueError.
    """
    given = dict(config)
    shift = given.pop("shift", False)
    if not isinstance(shift, bool):
        raise ValueError(f"{where}.shift must be true or false, got {shift!r}")
    padding = Padding.taken_from(given, where)
    made_up = {settings.MADE_UP: partial(_made_up, words)}
    source = dataset_from({"kind": settings.MADE_UP, **given}, where, {**made_up, **kinds})
    return Preferences(source, words, shift, where, padding=padding, mixed=bool(source_names(given)))


def _made_up(words: int, given: Mapping[str, Any], where: str) -> TensorDataset:
    """The answer that is liked better goes on as the question did, the other one with any tokens. Both end anywhere."""
    values = {key: whole_number(given.get(key, default), f"{where}.{key}") for key, default in MADE_UP.items()}
    for key in given:
        if key not in MADE_UP:
            raise ValueError(f"{where}: unknown key {key!r}, expected some of kind, {', '.join(MADE_UP)}")
    samples, length = values["samples"], max(4, values["length"])
    generator = torch.Generator().manual_seed(settings.made_up_seed(where))
    ids = torch.randint(words, (samples, 2, length + 1), generator=generator)
    asked = length // 2
    for place in range(1, length + 1):
        ids[:, 0, place] = (ids[:, 0, place - 1] * 5 + 7) % words
    ids[:, 1, :asked] = ids[:, 0, :asked]
    ends = torch.randint(asked + 1, length + 1, (samples, 2, 1), generator=generator)
    places = torch.arange(length)
    mask = (places < ends).long()
    labels = torch.where((places + 1 >= asked) & (places + 1 <= ends), ids[..., 1:], IGNORED)
    return TensorDataset((ids[..., :-1] * mask, mask), (labels,))


def answer_log_probabilities(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """How probable a model of transformers takes each answer to be: [samples, 2] in fp32, the natural logarithm summed
    over its tokens. inputs: those of `Preferences`.
    """
    ids, mask, labels = (part.flatten(0, 1) for part in inputs)
    more = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True, **more).logits
    of_tokens = -F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return of_tokens.view(-1, 2, labels.shape[-1]).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    """beta: how much it costs to depart from the reference. smoothing: the share of pairs that are taken to be labelled
    the wrong way round.
    """

    beta: float = 0.1
    smoothing: float = 0.0

    def loss(self, outputs: Parts, targets: Parts) -> Tensor:
        """The mean over the pairs. outputs: what `answer_log_probabilities` says of the model and of its reference."""
        margins = self._margins(outputs)
        right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
        return -((1 - self.smoothing) * right + self.smoothing * wrong).mean()

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """By name, as TRL has them: a reward is beta times how much more probable an answer is to the model."""
        return {
            "reward_chosen": lambda outputs, targets: self._rewards(outputs)[:, 0].mean(),
            "reward_rejected": lambda outputs, targets: self._rewards(outputs)[:, 1].mean(),
            "reward_margin": lambda outputs, targets: self._margins(outputs).mean(),
            "reward_accuracy": lambda outputs, targets: (self._margins(outputs) > 0).float().mean(),
        }

    def _margins(self, outputs: Parts) -> Tensor:
        rewards = self._rewards(outputs)
        return rewards[:, 0] - rewards[:, 1]

    def _rewards(self, outputs: Parts) -> Tensor:
        """[samples, 2]: of the answer that was liked better, and of the other one."""
        model, reference = outputs
        return self.beta * (model - reference)


def preferring(task: Task, dpo: Dpo, data: Mapping[str, Any], evaluated: Mapping[str, Any] | None) -> Task:
    """The task with its reference beside it, the loss and the metrics. task: its model returns what
    `answer_log_probabilities` does. data, evaluated: the configs of its data and of those to evaluate.
    """
    evaluation = task.evaluation
    if evaluation is not None:
        measured = {**dpo.metrics, **by_source(dpo.loss, source_names(evaluated or {}))}
        evaluation = Evaluation(dataset=evaluation.dataset, metrics=measured)
    metrics = {**dpo.metrics, **by_source(dpo.loss, source_names(data))}
    return replace(with_reference(task), loss=dpo.loss, metrics=metrics, evaluation=evaluation)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, none of whose modules drops anything out: the reference has to be what the model was."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
