"""Causal and masked language models of Hugging Face transformers: `bamboo_trainer.models.huggingface:build`.

The model's blocks become layers. A worker reads the values of its layers from the safetensors in the model's folder, so
no process holds the whole model; `bamboo export --format huggingface` writes trained weights in the same layout. Models
on the Hub are fetched into the Hub's cache, by commit. If no commit is given, an error names the Hub's current one.

`BalancedExperts` is the load-balancing loss of a mixture of experts (MoE), as transformers computes it with
`output_router_logits`: number of experts * sum over experts of (how often the expert is chosen * how probable it is),
both as means over all tokens and all routers of the model (Fedus et al., Switch Transformers, 2021, equations 4 to 6,
for one router). So layers pass on the sums of both and the number of tokens; the last layer computes the loss.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn

from bamboo_trainer import schedules
from bamboo_trainer.data.config import Opener
from bamboo_trainer.data.config_keys import arguments
from bamboo_trainer.from_module import SplitModule, example_of, task_of_split
from bamboo_trainer.models import texts
from bamboo_trainer.models.huggingface_files import PublishedWeights, model_folder, stay_offline
from bamboo_trainer.models.sequences import (
    Objective,
    Sequences,
    decaying,
    evaluation,
    open_sequences,
    token_loss,
    with_length,
)
from bamboo_trainer.task import Dataset, Parts, Task, TrainingFacts, add_loss
from bamboo_trainer.tasks.task_errors import TaskError

NAME = "router"  # of the loss in reports


class BalancedExperts:
    """The load-balancing loss of a transformers model's experts (MoE); implements `split.layers.Alongside`.

    The layers pass on `size` tensors: fp32 [2 * experts + 1], sums over tokens and routers, and the data's mask, if
    any. The sums count each expert's choices, add up each expert's probability, and count the tokens.
    """

    def __init__(self, routers: Sequence[Any], experts: int, chosen: int, coefficient: float, *, masked: bool) -> None:
        """Create the loss. routers: transformers' `OutputRecorder`s of routers' results. experts: number of experts.
        chosen: number of experts for each token. coefficient: factor of the loss. masked: the data have a mask.
        """
        self._routers, self._experts, self._chosen, self._coefficient = routers, experts, chosen, coefficient
        self.size = 2 if masked else 1

    def begin(self, inputs: Parts) -> Parts:
        return (torch.zeros(2 * self._experts + 1, device=inputs[0].device), *inputs[1 : self.size])

    def watched(self, block: nn.Module) -> list[nn.Module]:
        return [module for name, module in block.named_modules() if self._recorder(name, module) is not None]

    def after(self, seen: list[tuple[nn.Module, object]], parts: Parts) -> Parts:
        sums, *mask = parts
        for module, returned in seen:
            recorder = self._recorder(None, module)
            logits = returned if isinstance(returned, Tensor) else returned[recorder.index]  # type: ignore[index]
            sums = sums + self._sums(logits, mask[0] if mask else None)
        return (sums, *mask)

    def end(self, parts: Parts) -> None:
        add_loss(self._coefficient * self.loss(parts[0]), NAME)

    def loss(self, sums: Tensor) -> Tensor:
        chosen, probable, tokens = torch.split(sums, [self._experts, self._experts, 1])
        return self._experts * torch.sum((chosen / tokens) * (probable / tokens))

    def _sums(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return one router's part of the sums of `BalancedExperts`: fp32 [2 * experts + 1].

        logits: [tokens, experts]. mask: [samples, length]; 0 for tokens that do not count; None: all count.
        """
        probable = torch.softmax(logits.reshape(-1, self._experts), dim=-1)
        counts = torch.ones(len(probable), device=logits.device) if mask is None else mask.reshape(-1).float()
        picked = torch.topk(probable, self._chosen, dim=-1).indices
        chosen = torch.zeros_like(probable, dtype=torch.float32).scatter(1, picked, 1.0).detach()
        of_token = torch.cat([chosen, probable.float(), torch.ones_like(chosen[:, :1])], dim=1)
        return (of_token * counts.unsqueeze(1)).sum(0)

    def _recorder(self, name: str | None, module: nn.Module) -> Any:
        """Return the `OutputRecorder` that fits a module; None if the module is no router. name: the module's name in
        its block; None: do not check the name.
        """
        fits = (r for r in self._routers if isinstance(module, r.target_class))
        return next((r for r in fits if name is None or r.layer_name is None or r.layer_name in name), None)


def balanced_experts(model: nn.Module, coefficient: float | None, *, masked: bool) -> BalancedExperts | None:
    """Return the load-balancing loss of a model's experts (MoE); None if there is no coefficient, or it is 0.

    coefficient: factor of the loss; None: the model's, if its config has `output_router_logits: true`. masked: the data
    have a mask. Raises ValueError if `output_router_logits` is true but no coefficient is known, or if the
    coefficient is not 0 but the model's loss is missing or differs from `BalancedExperts`.
    """
    config: Any = model.config
    if coefficient is None and getattr(config, "output_router_logits", False):
        names = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
        coefficient = next((c for c in (getattr(model, name, None) for name in names) if c is not None), None)
        if coefficient is None:
            raise ValueError("output_router_logits: the model names no coefficient: say it as routerAuxLossCoef")
    if not coefficient:
        return None
    kind = type(model).__name__
    found = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    theirs = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    experts, chosen = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    if found is None or theirs is None or experts is None or chosen is None:
        raise ValueError(f"routerAuxLossCoef: transformers has no loss that balances experts for a {kind}")
    routers = found if isinstance(found, list) else [found]
    made = BalancedExperts(routers, int(experts), int(chosen), float(coefficient), masked=masked)
    if not _agree(made, theirs, int(experts), int(chosen)):
        raise ValueError(f"routerAuxLossCoef: the loss that balances the experts of a {kind} is not known here")
    return made


def _agree(ours: BalancedExperts, theirs: Any, experts: int, chosen: int) -> bool:
    """Return whether our loss and transformers' agree, up to rounding, for random logits of two routers."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, experts, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sums = sum((ours._sums(one, mask) for one in logits), torch.zeros(2 * experts + 1))
    return torch.allclose(ours.loss(sums), torch.as_tensor(theirs(logits, experts, chosen, mask)), rtol=1e-5)


ATTENTIONS: Final = ("sdpa", "eager")
AUTO: Final[dict[Objective, tuple[str, str]]] = {  # the class that makes the model, and the mapping of its configs
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
}
PACKS: Final = frozenset(  # models tested to keep documents of a sequence apart
    {"gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma3_text", "jetmoe"}
)
_POSITIONS: Final = re.compile(r"wpe|(?!.*relative).*position.*")  # names of models' tables of positions
_NO_TABLE: Final = {  # the key of the limit, for models that have no such table, but still have a largest length
    **dict.fromkeys(("codegen", "ctrl", "gptj"), "max_position_embeddings"),
    "mpt": "max_seq_len",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSettings:
    """The settings in task.config; either model or architecture is set.

    model: a folder; `read_settings` replaces an id on the Hub with the model's cached folder. revision: the commit, if
    the config has an id. architecture: the content of a config.json, or a model_type alone.
    """

    model: str | None = None
    revision: str | None = None
    architecture: str | Mapping[str, Any] | None = None
    # data, evaluation: see `models.sequences`
    data: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None
    objective: Objective | None = None  # None: `objective_of`
    attention: Literal["sdpa", "eager"] | None = None  # None: sdpa where the model has it
    blocks: str | Sequence[str] | None = None  # the names of the model's lists of blocks, if they are not found
    random: bool = False  # random first values, even if the folder has others
    learning_rate: float = 5e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    checkpoint: bool = False
    router_aux_loss_coef: float | None = None  # of the loss that balances experts; None: the model config's


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The model that a task's config names. config: the model's transformers config."""

    settings: HuggingFaceSettings
    config: Any
    objective: Objective

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Parse a task's config, fetch the model from the Hub if needed, and load its config. Raises ValueError."""
        settings = read_settings(config)
        published = published_config(settings)
        return cls(settings=settings, config=published, objective=settings.objective or objective_of(published))

    def make(self) -> nn.Module:
        """Create the whole model with random values in fp32; training.precision decides what is computed in 16 bits."""
        auto = getattr(transformers(), AUTO[self.objective][0])
        attention = self.settings.attention
        model: nn.Module = auto.from_config(self.config, dtype=torch.float32, attn_implementation=attention)
        return model

    def opened(self, data: Mapping[str, Any], where: str = "data") -> Sequences:
        """Open the data that a config describes. where: the config's key. Raises ValueError, StorageError."""
        objective, config, words, model = self.objective, self.config, vocabulary_of(self.config), self.settings.model
        token = mask_token(config) if objective == "masked" else 0
        packs = objective == "causal" and config.model_type in PACKS
        kinds: dict[str, Opener] = {texts.TEXT: partial(texts.open_text, model, words)}
        if model is not None and not self.settings.random:
            kinds[texts.TOKENS] = partial(texts.open_tokens, model)
        if objective == "causal":
            kinds[texts.KIND] = partial(texts.open_chats, model, words)
        return open_sequences(data, objective, (words, token), where, packs=packs, kinds=kinds)


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build the task of a model of transformers. config: see `HuggingFaceSettings`. Raises ValueError, StorageError."""
    named = NamedModel.read(config)
    settings = named.settings
    auto, classes = AUTO[named.objective]
    expect(
        type(named.config) in getattr(transformers(), classes),
        f"objective: transformers has no {auto.removeprefix('AutoModel')} of {named.config.model_type}",
    )
    data = settings.data or {}
    dataset = named.opened(data)

    def held_out(given: Mapping[str, Any]) -> Dataset:
        opened = named.opened(_with_keys_of(data, given), "evaluation")
        expect(opened.names == dataset.names, "evaluation: expected a mask of those that count just if data has one")
        return opened

    weights = None
    if settings.model is not None and not settings.random:
        weights = PublishedWeights(Path(settings.model))
    measured = evaluation(settings.evaluation, held_out)
    lengths = {"data": dataset} if measured is None else {"data": dataset, "evaluation": measured.dataset}

    def make() -> nn.Module:
        model = named.make()
        check_positions(model, named.config, lengths)
        return model

    call, read = partial(_logits, dataset.names), weights.read if weights else None
    balance = partial(balanced_experts, coefficient=settings.router_aux_loss_coef, masked=dataset.masked)
    split = SplitModule(make, settings.blocks, example_of(dataset), call, read, balance)
    if weights:
        weights.check(split.forms)
    return task_of_split(
        split,
        loss=token_loss,
        dataset=dataset,
        evaluation=measured,
        tokens_per_sample=dataset.tokens_per_sample,
        optimizer=lambda named: torch.optim.AdamW(decaying(named, settings.weight_decay), lr=settings.learning_rate),
        learning_rate=rate(settings, training.steps_with(dataset, dataset.tokens_per_sample) if training else None),
        checkpoint=settings.checkpoint,
    )


def read_settings(config: Mapping[str, Any]) -> HuggingFaceSettings:
    """Parse a task's config. Its `model` becomes a local folder, fetched from the Hub if needed. Raises ValueError."""
    settings = HuggingFaceSettings(**arguments(HuggingFaceSettings, config))
    expect((settings.model is None) != (settings.architecture is None), "expected one of model and architecture")
    expect(settings.learning_rate > 0, f"learningRate must be positive, got {settings.learning_rate}")
    expect(settings.warmup_steps >= 0, f"warmupSteps must be at least 0, got {settings.warmup_steps}")
    expect(
        settings.router_aux_loss_coef is None or settings.router_aux_loss_coef >= 0,
        f"routerAuxLossCoef must be at least 0, got {settings.router_aux_loss_coef}",
    )
    expect(settings.weight_decay >= 0, f"weightDecay must be at least 0, got {settings.weight_decay}")
    if settings.model is None:
        expect(settings.revision is None, "revision: expected only with an id on the Hub as model")
        return settings
    transformers()
    folder = model_folder(settings.model, settings.revision, weights=not settings.random)
    return replace(settings, model=folder)


def published_config(settings: HuggingFaceSettings) -> Any:
    """Return the transformers config that the task's config names. Raises ValueError."""
    library = transformers()
    if settings.model is not None:
        folder = Path(settings.model)
        expect(folder.exists(), f"model: there is no folder {folder}")
        expect((folder / "config.json").is_file(), f"model: {folder} has no config.json, as save_pretrained writes it")
        return _made("model", lambda: library.AutoConfig.from_pretrained(str(folder), local_files_only=True))
    content = settings.architecture
    given = {"model_type": content} if isinstance(content, str) else dict(content or {})
    kind = given.pop("model_type", None)
    expect(isinstance(kind, str), "architecture must have a model_type, such as gpt2, llama, qwen3 or bert")
    found = _made("architecture", lambda: library.AutoConfig.for_model(kind, **given))
    _check_architecture(given, _made("architecture", type(found)))
    return found


def _check_architecture(given: Mapping[str, Any], usual: Any) -> None:
    """Raise ValueError for a probable misspelling: an unknown key that resembles a known key that is not given.

    given: the keys of an architecture. usual: the default config of that model type. Other unknown keys are allowed, as
    in transformers: a published config.json has keys that have no effect.
    """
    known = {*usual.to_dict(), *usual.attribute_map}
    free = sorted(known - given.keys())
    for key in sorted(given.keys() - known):
        if near := get_close_matches(key, free, n=1, cutoff=0.8):
            raise ValueError(f"architecture: unknown key {key!r}, did you mean {near[0]}?")


def _with_keys_of(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation's data config. Its length and tokenizer, if its kind has them, default to `data`'s."""
    found = with_length(given, data.get("length"))
    tokenized = (texts.TEXT, texts.KIND)
    if "tokenizer" in data and data.get("kind") in tokenized and found.get("kind") in tokenized:
        found.setdefault("tokenizer", data["tokenizer"])
    return found


def objective_of(config: Any) -> Objective:
    """Return a model's default objective: the one that transformers has for its type. If both exist: "masked"
    if the config names a masked architecture, else "causal" if it names any or has `is_decoder`, else "masked".

    Raises ValueError for a type with neither, and for encoder-decoders. config: a transformers config.
    """
    library = transformers()
    causal = type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING
    masked = type(config) in library.MODEL_FOR_MASKED_LM_MAPPING
    expect(
        (causal or masked) and not config.is_encoder_decoder,
        f"{config.model_type} is no causal or masked language model of transformers; from_module splits others",
    )
    named = " ".join(getattr(config, "architectures", None) or ())
    if masked and ("MaskedLM" in named or "PreTraining" in named):
        return "masked"
    return "masked" if masked and not (causal and (getattr(config, "is_decoder", False) or named)) else "causal"


def check_positions(model: nn.Module, config: Any, datasets: Mapping[str, Any]) -> None:
    """Raise TaskError if a dataset's sequences are longer than `positions_of` allows. datasets: by the config's key."""
    most = positions_of(model, config)
    for key, dataset in datasets.items():
        if most is not None and dataset.length > most:
            raise TaskError(
                f"task.config: {key}: expected sequences of at most {most} tokens, for more the model "
                f"({config.model_type}) has no positions, got {dataset.length}"
            )


def positions_of(model: nn.Module, config: Any) -> int | None:
    """Return a model's maximum sequence length in tokens; None if it has no limit, as with rotary positions."""
    limit = getattr(config, _NO_TABLE.get(config.model_type, "max_position_embeddings"), None)
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _POSITIONS.fullmatch(name.rpartition(".")[2])
    ]
    if not tables and config.model_type not in _NO_TABLE:
        return None
    return min([*map(_rows, tables), *([limit] if isinstance(limit, int) and limit > 0 else [])], default=None)


def _rows(table: nn.Embedding) -> int:
    """Return the number of usable rows of a position embedding: some models leave out its first rows, or the rows up to
    the padding token's.
    """
    padding = -1 if table.padding_idx is None else table.padding_idx
    return table.num_embeddings - int(getattr(table, "offset", padding + 1))


def vocabulary_of(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def mask_token(config: Any) -> int:
    """Return the mask token's id: the config's, else the smaller of 103 (BERT's) and the last id. Raises ValueError."""
    found, words = getattr(config, "mask_token_id", None), vocabulary_of(config)
    expect(found is None or 0 <= found < words, f"mask_token_id must be a token below vocab_size {words}, got {found}")
    return int(found) if found is not None else min(103, words - 1)


def rate(settings: HuggingFaceSettings, steps: int | None) -> Callable[[int], float]:
    """Return a learning rate schedule: linear warm-up, then linear decay, which reaches 0 when `steps` steps are done.
    If `steps` is None, the rate stays constant after the warm-up.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if steps is None:
        return schedules.constant(peak, warmup)
    return schedules.linear(peak, steps=max(steps, warmup + 1), warmup=warmup)


def transformers() -> Any:
    try:
        import transformers as library
        from huggingface_hub import constants
    except ImportError:
        raise ValueError(
            "the library transformers is not installed: pip install 'bamboo-trainer[huggingface]'"
        ) from None
    library.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    stay_offline(constants)
    return library


def expect(holds: bool, otherwise: str) -> None:
    """Raise ValueError, with a sentence for the user, unless `holds`."""
    if not holds:
        raise ValueError(otherwise)


def _made(key: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"{key}: {error}") from error


def _logits(names: Sequence[str], model: nn.Module, inputs: Parts) -> Tensor:
    """Run a model of transformers, and return its logits. names: the names of the inputs. If the inputs have positions
    but no mask, transformers begins a new document wherever the positions begin again.
    """
    named = dict(zip(names, inputs, strict=True))
    masked = "attention_mask" in named
    if not masked and "position_ids" not in named:
        named["attention_mask"] = torch.ones_like(inputs[0])
    more = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    with _masks_made(masked):
        output = model(**named, use_cache=False, return_dict=True, **more)
    logits: Tensor = output.logits
    return logits


@contextmanager
def _masks_made(padded: bool) -> Iterator[None]:
    """Patch transformers in this context so that the values of the data's mask or positions do not decide whether it
    creates an attention mask.

    padded: the data have a mask. If so, attention uses it even if it is all ones; if not, attention ignores the mask of
    ones from `_logits`. Recurrent layers use either mask, [samples, length]. The patch does not change results.
    """
    masking_utils: Any = importlib.import_module("transformers.masking_utils")
    functions, is_tracing = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, masking_utils.is_tracing
    before = {name: functions[name] for name in ATTENTIONS}

    def made(original: Callable[..., Any], *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if not padded:
            return original(*args, attention_mask=None, **kwargs)
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return original(*args, attention_mask=attention_mask, **kwargs)

    for name, original in before.items():
        functions[name] = partial(made, original)
    masking_utils.is_tracing = lambda tensor=None: tensor is not None or is_tracing(tensor)
    try:
        yield
    finally:
        masking_utils.is_tracing = is_tracing
        for name in before:
            del functions[name]
