"""Folders of published model weights, on this machine or on the Hugging Face Hub.

`PublishedWeights` reads a folder with model.safetensors, or with several files and their index. At first it reads only
the header of the single file, or the index. It reads each tensor when the tensor is needed.

`model_folder` returns the folder of a model by its id on the Hub. The model is pinned to a commit, since a branch may
change before another worker joins. Workers with the same HF_HOME folder share the Hub's cache, in which a commit is
looked up without a network. A child process fetches missing files: it obeys the environment's HF_HUB_OFFLINE, uses
HF_TOKEN, and ends with the worker.
"""

import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bamboo_core.complaints import said_by
from bamboo_trainer.models.texts import TOKENIZER_FILES
from bamboo_trainer.tasks.inspection import from_child

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_OLDER: Final = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


class PublishedWeights:
    """The safetensors weights in a published folder. Raises ValueError, with a sentence for the user, if a file or the
    index is missing or invalid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = self._found()

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read tensors from the folder. Return them by the model's names, without tensors that the folder lacks.

        wanted: by the model's names, tensors of the wanted shapes and dtypes. If a tensor has several names, the folder
        needs only one. Floats are converted. Raises ValueError for another shape or dtype or a bad file.
        """
        values: dict[int, Tensor] = {}
        for name, form in wanted.items():
            published = self._name(name)
            if published is not None and id(form) not in values:
                values[id(form)] = self._tensor(published, form)
        return {name: values[id(form)] for name, form in wanted.items() if id(form) in values}

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the folder lacks a parameter. wanted: see `read`."""
        known = {id(form) for name, form in wanted.items() if self._name(name) is not None}
        for name, form in wanted.items():
            if id(form) not in known and isinstance(form, torch.nn.Parameter):
                raise ValueError(
                    f"model: {self.folder} has no tensor {name}; to begin with random values say random: true"
                )

    def _name(self, name: str) -> str | None:
        """Return the folder's name for a tensor, perhaps older or with another prefix; None if the folder lacks it."""
        _, _, without = name.partition(".")
        candidates = [name, without, *(f"{base}.{name}" for base in ("model", "transformer", "bert"))]
        for new, old in _OLDER:
            candidates += [c.removesuffix(new) + old for c in (name, without) if c.endswith(new)]
        return next((c for c in candidates if c in self._files), None)

    def _tensor(self, name: str, form: Tensor) -> Tensor:
        path = self._files[name]
        with opened(path) as file:
            if name not in file.keys():  # noqa: SIM118
                raise ValueError(f"model: {path} does not have the tensor {name} that the index says it has")
            found: Tensor = file.get_tensor(name)
        kind = found.dtype in FLOATS if form.is_floating_point() else found.dtype == form.dtype
        if found.shape != form.shape or not kind:
            raise ValueError(
                f"model: {name} in {path} is {found.dtype} {list(found.shape)}, expected {list(form.shape)} in "
                "float32, bfloat16 or float16"
            )
        return found.to(form.dtype, copy=True)  # a copy, not a view of the file

    def _found(self) -> dict[str, Path]:
        if not (self.folder / SINGLE).exists() and not (self.folder / INDEX).exists():
            raise ValueError(
                f"model: {self.folder} has neither {SINGLE} nor {INDEX}; to begin with random values say random: true"
            )
        try:
            return published_files(self.folder)
        except ValueError as error:
            raise ValueError(f"model: {error}") from None


def published_files(folder: Path) -> dict[str, Path]:
    """Return each tensor's file, by published tensor name. Raises ValueError for a missing or bad file or index."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        with opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(f"{index} must have a weight_map of tensor names to file names")
    if strange := [file for file in named.values() if Path(file).name != file]:
        raise ValueError(f"{index} names {strange[0]}, expected the name of a file beside it")
    if missing := sorted({file for file in named.values() if not (folder / file).is_file()}):
        raise ValueError(f"{index} names {missing[0]}, which is not there")
    return {name: folder / file for name, file in named.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {said_by(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {said_by(error)}") from None


COMPANIONS: Final = (
    *TOKENIZER_FILES,
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
)
GENERATION: Final = "generation_config.json"
TEMPLATES: Final = "additional_chat_templates"  # a folder
_DESCRIPTION: Final = ("config.json", GENERATION, *COMPANIONS, f"{TEMPLATES}/*")
_WEIGHTS: Final = (SINGLE, INDEX, "model-*-of-*.safetensors")
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # gpt2, openai-community/gpt2


def model_folder(given: str, revision: str | None, *, weights: bool) -> str:
    """Return a model's folder: `given` itself or, for an id on the Hub, the model's folder in the Hub's cache.

    A child process fetches missing files into the cache: the model's description and, if `weights`, safetensors
    weights, but never other formats or code.

    Raises ValueError if an id has no commit hash as `revision`, if a folder has a revision, or if fetching fails.
    """
    if Path(given).exists() or not _ID.fullmatch(given) or given.endswith(".json"):
        if revision is not None:
            raise ValueError(f"revision: expected only with an id on the Hub as model, got the folder {given}")
        return given
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ValueError(_not_pinned(given, revision))
    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    return _in_cache(given, revision, patterns) or _of_child(f"model: {given}", _fetched(given, revision, patterns))


def _not_pinned(given: str, revision: str | None) -> str:
    sentence = f"model: there is no folder {given}; for the model of that name on the Hub"
    if revision is None:
        sentence = f"{sentence} revision must name a commit of it"
    else:
        sentence = f"{sentence} revision must be a commit of 40 hex digits, got {revision!r}"
    try:
        return f"{sentence}; {revision or 'main'} is {_of_child('', _commit_of(given, revision or 'main'))} now"
    except ValueError as error:
        return f"{sentence} ({error})"


def _in_cache(model: str, commit: str, patterns: list[str]) -> str | None:
    """Return the model's folder in the cache; None if the cache lacks any of its files. Makes no request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=commit, allow_patterns=patterns, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None  # the caller fetches it


def _of_child(subject: str, answer: Iterator[tuple[str, str]]) -> str:
    """Run `answer`, which yields (result, problem), in a child process; return the result. Raises ValueError."""
    answers, why = from_child(answer)
    found, problem = answers[0] if answers else ("", why)
    if problem:
        raise ValueError(f"{subject}: {problem}" if subject else problem)
    return found


def _fetched(model: str, commit: str, patterns: list[str]) -> Iterator[tuple[str, str]]:
    """Fetch a model's files from the Hub, and yield (folder, problem). Must run in a child process."""
    from huggingface_hub import constants, snapshot_download

    _as_the_environment_says()
    try:
        folder = snapshot_download(model, revision=commit, allow_patterns=patterns)
    except Exception as error:  # the library raises what its own libraries raise
        what = f"hf download {model} --revision {commit}"
        instead = (
            f"run `{what}` where there is a network, for the cache {constants.HF_HUB_CACHE}, or name a folder as model"
        )
        yield "", _problem(error, model, commit, instead)
    else:
        yield folder, ""


def _commit_of(model: str, revision: str) -> Iterator[tuple[str, str]]:
    """Ask the Hub for the commit of a branch or a tag, and yield (commit, problem). Must run in a child process."""
    from huggingface_hub import HfApi

    _as_the_environment_says()
    try:
        found = HfApi().model_info(model, revision=revision).sha
    except Exception as error:  # as above
        yield "", _problem(error, model, revision, "name a folder as model")
    else:
        yield str(found), ""


def _as_the_environment_says() -> None:
    """Let this child process access the Hub, unless the user's environment forbids it, and hide progress bars."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    constants.HF_HUB_OFFLINE = any(value.upper() in constants.ENV_VARS_TRUE_VALUES for value in values)
    disable_progress_bars()


def _problem(error: Exception, model: str, revision: str, instead: str) -> str:
    """Return a sentence about a failed request to the Hub, without the library's message, which might hold a password
    or a token. instead: what the user can do.
    """
    from huggingface_hub import constants, errors

    parts = urllib.parse.urlsplit(constants.ENDPOINT)
    where = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # without a password
    if constants.HF_HUB_OFFLINE:
        return f"it is not in the cache as a whole, and HF_HUB_OFFLINE forbids to fetch it: {instead}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the reason of the failed download
    if isinstance(error, errors.GatedRepoError):
        return f"{where} gives it only to who has accepted its terms: set HF_TOKEN to a token of theirs, or {instead}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{where} has no model {model} that HF_TOKEN may read, or none without HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where} has no revision {revision} of {model}"
    if isinstance(error, errors.HfHubHTTPError):
        return f"{where} answered {getattr(error.response, 'status_code', 'with an error')}: {instead}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"it cannot be kept in the cache {constants.HF_HUB_CACHE}: {said_by(error)}"
    return f"{where} cannot be reached ({type(error).__name__}): {instead}"


def stay_offline(library: Any) -> None:
    """Stop transformers from looking on the Hub for missing files. library: `huggingface_hub.constants`."""
    library.HF_HUB_OFFLINE = True
