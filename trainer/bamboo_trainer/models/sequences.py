"""Tasks of causal and masked language models: sequences of tokens, losses, and ready-made models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer import schedules
from bamboo_trainer.data import Documents, TensorDataset, dataset_from, pure_seed
from bamboo_trainer.data.config import MIXTURE, Opener
from bamboo_trainer.data.config_keys import require_known, typed
from bamboo_trainer.data.datasets import readers_of
from bamboo_trainer.task import Dataset, Evaluation, Parts, Task, TrainingFacts, Weighted

Objective = Literal["causal", "masked"]
Named = Iterable[tuple[str, nn.Parameter]]
Part = Callable[[Mapping[str, Any]], nn.Module]  # of a model, made from its config
IGNORED: Final = -100  # a target that does not count
MASKED_SHARE: Final = 0.15  # of the tokens; of these 80 % become the mask, 10 % another token, 10 % stay
MADE_UP: Final = "random"
HELD_OUT: Final = 1 << 40  # the seed of made-up data for an evaluation
TRAINING: Final[dict[str, Any]] = {"learningRate": 1e-3, "warmupSteps": 0, "weightDecay": 0.0, "checkpoint": False}
KINDS_WITH_LENGTH: Final = (MADE_UP, "tokens", "text", "chats")


class Sequences:
    """A dataset of token sequences for a language model, made from another dataset.

    Inputs: int64 [samples, length], and a mask of the tokens that count if the source has one. Targets: the same shape;
    -100 marks targets that do not count.

    source: has tokens, and perhaps a mask. For the objective "causal" it also has targets, each at the position of the
    token before it. For "masked", this class chooses the tokens to predict, by the sample's number. shift: move each
    target to the position before; for targets at their own positions, like labels of transformers. words: the
    vocabulary's size, and the mask token. where: the data's key in the config. Raises ValueError for other sources.

    packed: instead of a mask the source has the number of each token's document, and the second input is the token's
    position in its document. names: the names of the inputs, as in transformers.
    """

    def __init__(
        self,
        source: Dataset,
        objective: Objective,
        words: tuple[int, int],
        shift: bool,
        where: str = "data",
        *,
        packed: bool = False,
    ) -> None:
        self._source, self._objective, self._shift, self._where = source, objective, shift, where
        self._vocabulary, self._mask_token = words
        self._packed = packed
        given, targets = source.batch([0])
        if not 1 <= len(given) <= 2 or (objective == "causal" and len(targets) != 1):
            raise ValueError(
                f"{where}: expected tokens, perhaps a mask, and targets, got {len(given)} inputs and {len(targets)} "
                "targets"
            )
        self.masked = len(given) == 2 and not packed
        self.prefetched = readers_of(source)
        self.names = ("input_ids", "position_ids" if packed else "attention_mask")[: len(given)]
        self.length = int(given[0].shape[1])
        length = None if self.masked else self.length
        self.tokens_per_sample: int | None = getattr(source, "tokens_per_sample", None) or length

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Return these samples' inputs and targets. Raises ValueError for an input token outside of the vocabulary."""
        given, targets = self._source.batch(indices)
        ids = given[0].long()
        check_tokens(ids, self._vocabulary, self._where)
        mask = given[1].long() if self.masked else None
        if self._objective == "masked":
            ids, labels = self._hidden(ids, mask, indices)
        else:
            labels = targets[0].long()
            if self._shift:
                labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
        if self._packed:
            return (ids, positions_in(given[1].long())), (labels,)
        return (ids,) if mask is None else (ids, mask), (labels,)

    def _hidden(self, ids: Tensor, mask: Tensor | None, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        seen, labels = ids.clone(), torch.full_like(ids, IGNORED)
        for row, index in enumerate(indices):
            generator = torch.Generator().manual_seed(pure_seed("masked", index))
            chosen = torch.rand(ids.shape[1], generator=generator) < MASKED_SHARE
            if mask is not None:
                chosen &= mask[row].bool()
            how = torch.rand(ids.shape[1], generator=generator)
            others = torch.randint(0, self._vocabulary, (ids.shape[1],), generator=generator)
            labels[row, chosen] = ids[row, chosen]
            seen[row, chosen & (how < 0.8)] = self._mask_token
            exchanged = chosen & (how >= 0.8) & (how < 0.9)
            seen[row, exchanged] = others[exchanged]
        return seen, labels


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its document. documents: [samples, length], document numbers."""
    places = torch.arange(documents.shape[1]).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(1).values


def open_sequences(
    config: Mapping[str, Any],
    objective: Objective,
    words: tuple[int, int],
    where: str = "data",
    *,
    packs: bool = False,
    kinds: Mapping[str, Opener] = MappingProxyType({}),
) -> Sequences:
    """Open the sequences that a config describes. Raises ValueError, StorageError.

    config: see `bamboo_trainer.data.dataset_from`. The default kind, "random", makes up sequences, and takes
    "length", "samples" and "padding". Its "shift", and words: see `Sequences`. where: the config's key; made-up
    samples differ by key. packs: the model can keep documents of one sequence apart. kinds: the functions that open
    additional kinds.
    """
    given = dict(config)
    shift = typed(f"{where}.shift", given.pop("shift", False), bool)
    made_up = {MADE_UP: partial(_made_up, words[0])}
    source = dataset_from({"kind": MADE_UP, **given}, where, {**made_up, **kinds})
    packed = _packed(given, where)
    if packed and not packs:
        raise ValueError(f"{where}.{packed} is not for language models of this kind: they do not keep documents apart")
    return Sequences(source, objective, words, shift, where, packed=bool(packed))


def _packed(config: Mapping[str, Any], where: str) -> str:
    """Return the config's setting that keeps documents in a sequence apart, for messages; "" if there is none. Raises
    ValueError if only some of a mixture's sources have it. config: of a dataset that opened without error.
    """
    if config.get("kind") == MIXTURE:
        found = [_packed(source, f"{where}.sources[{number}]") for number, source in enumerate(config["sources"])]
        if any(found) and not all(found):
            raise ValueError(f"{where}.sources: expected all of them with several documents in a sequence, or none")
        return f"sources[0].{found[0]}" if found[0] else ""
    if config.get("documents") == Documents.NUMBERED:
        return "documents: numbered"
    return "packed" if config.get("packed") is True else ""


def with_length(config: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """Return a copy of a dataset's config, with `length` as its default if the config's kind takes a length."""
    kind = config.get("kind", MADE_UP)
    return {"length": length, **config} if length is not None and kind in KINDS_WITH_LENGTH else dict(config)


def accuracy(outputs: Parts, targets: Parts) -> tuple[Tensor, Tensor]:
    """Return the number of targets whose logit is the highest, and the number of targets, both without targets of -100.

    outputs: logits [samples, length, vocabulary]. targets: int64 [samples, length].
    """
    counts = targets[0] != IGNORED
    return ((outputs[0].argmax(-1) == targets[0]) & counts).sum(), counts.sum()


def _made_up(
    vocabulary: int, *, where: str, samples: int = 512, length: int = 32, padding: bool = False
) -> TensorDataset:
    """Make up random sequences in which the token before determines about seven of eight tokens.

    where: the data's key in the config; each key gives other sequences. padding: vary the lengths, and add a mask.
    """
    whole_numbers({"samples": samples, "length": length}, "samples", "length")
    seeds = {"data": 0, "evaluation": HELD_OUT}
    generator = torch.Generator().manual_seed(seeds[where] if where in seeds else pure_seed(where))
    drawn = torch.randint(0, vocabulary, (samples, length + 1), generator=generator)
    jump = torch.rand(samples, length + 1, generator=generator) < 0.125
    ids = drawn.clone()
    for place in range(1, length + 1):
        follows = (ids[:, place - 1] * 5 + 7) % vocabulary
        ids[:, place] = torch.where(jump[:, place], drawn[:, place], follows)
    targets = ids[:, 1:].clone()
    if not padding:
        return TensorDataset((ids[:, :-1].clone(),), (targets,))
    mask = torch.arange(length) < torch.randint(length // 2 + 1, length + 1, (samples, 1), generator=generator)
    targets[:, :-1][~mask[:, 1:]] = IGNORED
    targets[~mask] = IGNORED
    return TensorDataset((ids[:, :-1] * mask, mask.long()), (targets,))


def whole_numbers(values: Mapping[str, Any], *keys: str) -> None:
    """Raise ValueError, naming the key, unless the value of each of these keys is at least 1."""
    for key in keys:
        if values[key] < 1:
            raise ValueError(f"{key} must be at least 1, got {values[key]}")


def check_tokens(tokens: Tensor, words: int, where: str = "") -> None:
    """Raise ValueError for a token outside of a vocabulary of `words` tokens. where: the config's key, for messages."""
    for token in (int(tokens.min()), int(tokens.max())) if tokens.numel() else ():
        if not 0 <= token < words:
            place = f"{where}: " if where else ""
            raise ValueError(f"{place}token {token} is outside of the model's vocabulary of {words}")


def token_loss(outputs: Parts, targets: Parts) -> Weighted:
    """Return the cross entropy summed over the tokens that count, with their number, for the mean over a whole batch.

    outputs: logits [samples, length, vocabulary]. targets: int64 [samples, length]; -100 does not count.
    """
    (logits,), (wanted,) = outputs, targets
    summed = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
    return Weighted(summed, (wanted != IGNORED).sum())


def read_settings(config: Mapping[str, Any], sizes: Mapping[str, Mapping[str, Any]], default: str) -> dict[str, Any]:
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


def check_sizes(c: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, unless all sizes are at least 1 and heads divides width. c: the settings."""
    whole_numbers(c, "vocabulary", "positions", "width", "heads", "blocks")
    if c["width"] % c["heads"]:
        raise ValueError(f"width must be a multiple of heads = {c['heads']}, got {c['width']}")


def language_model(
    parts: tuple[Part, Part, Part],
    c: Mapping[str, Any],
    training: TrainingFacts | None,
    *,
    objective: Objective = "causal",
    mask_token: int = 0,
    tied: bool = True,
    rotary: bool = False,
) -> Task:
    """Return the task of a ready-made language model.

    parts: the classes of the embedding, the block (used c["blocks"] times) and the head; each takes c. c: the settings
    from `read_settings`. tied: the head's weight is the embedding's. rotary: sequences may be longer than
    c["positions"]. Raises ValueError for invalid data or a learningRate of 0; StorageError.
    """
    embedding, block, head = parts
    layers = (partial(embedding, c), *[partial(block, c)] * c["blocks"], partial(head, c))
    last = len(layers) - 1
    words = (c["vocabulary"], mask_token)
    decay, rate = c["weightDecay"], c["learningRate"]

    def opened(config: Mapping[str, Any], where: str = "data") -> Sequences:
        found = open_sequences(config, objective, words, where)
        if not rotary and found.length > c["positions"]:
            problem = f"expected sequences of at most {c['positions']} tokens (positions), got {found.length}"
            raise ValueError(f"{where}: {problem}")
        return found

    dataset = opened(with_length(c["data"], c["positions"]))

    def held_out(config: Mapping[str, Any]) -> Dataset:
        given = with_length(config, c["data"].get("length", c["positions"]))
        return opened(given, "evaluation")

    return Task(
        layers=layers,
        loss=token_loss,
        dataset=dataset,
        evaluation=evaluation(c["evaluation"], held_out),
        tokens_per_sample=dataset.tokens_per_sample,
        optimizer=lambda named: torch.optim.AdamW(decaying(named, decay), lr=rate, betas=(0.9, 0.95)),
        learning_rate=_rate(c, training, dataset),
        tied=(("0.token.weight", f"{last}.out.weight"),) if tied else (),
        checkpointed=range(1, last) if c["checkpoint"] else (),
    )


def _rate(c: Mapping[str, Any], training: TrainingFacts | None, dataset: Sequences) -> Callable[[int], float]:
    """Return a learning rate schedule: linear warm-up, then cosine decay to a tenth of the peak at the end of the job.
    If `training` is None, the rate stays constant after the warm-up. c: settings. Raises ValueError for a rate of 0.
    """
    peak, warmup = c["learningRate"], c["warmupSteps"]
    if peak <= 0:
        raise ValueError(f"learningRate must be positive, got {peak}")
    if training is None:
        return schedules.constant(peak, warmup)
    steps = training.steps_with(dataset, dataset.tokens_per_sample)
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


def evaluation(config: Mapping[str, Any] | None, opened: Callable[[Mapping[str, Any]], Dataset]) -> Evaluation | None:
    """Return a task's evaluation, with the metric `accuracy`; None if `config` is None. opened: opens the data that
    `config` describes.
    """
    if config is None:
        return None
    return Evaluation(dataset=opened(config), metrics={"accuracy": accuracy})
