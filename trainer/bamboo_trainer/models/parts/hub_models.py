"""A model by its id on the Hugging Face Hub, and the commit that it is pinned to: its folder in the Hub's cache.

The workers of a node share the cache (HF_HOME), which a commit is looked up in without a network. What it lacks is
fetched by a child process: one that holds no lock, has the environment's HF_HUB_OFFLINE and HF_TOKEN, and ends with the
worker. A branch would be another model tomorrow, or for a worker that comes later.
"""

import os
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bamboo_core.complaints import said_by
from bamboo_trainer.data.hub import looks_like_an_id
from bamboo_trainer.models.parts.huggingface_weights import INDEX, SINGLE
from bamboo_trainer.models.parts.tokenizers import TOKENIZER_FILES
from bamboo_trainer.tasks.child import from_child

COMPANIONS: Final = (
    *TOKENIZER_FILES,
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
)
GENERATION: Final = "generation_config.json"
TEMPLATES: Final = "additional_chat_templates"  # a folder
_DESCRIPTION: Final = ("config.json", GENERATION, *COMPANIONS, f"{TEMPLATES}/*")
_WEIGHTS: Final = (SINGLE, INDEX, "model-*-of-*.safetensors")
_COMMIT: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model on the Hub at a commit. weights: they are needed, and not only the model's description."""

    id: str
    commit: str
    weights: bool

    @property
    def patterns(self) -> tuple[str, ...]:
        """The files to fetch: no other formats of the weights, and no code."""
        return (*_DESCRIPTION, *_WEIGHTS) if self.weights else _DESCRIPTION


def model_folder(given: str, revision: str | None, *, weights: bool) -> str:
    """Return the folder itself, if it is on this machine, else the model's folder in the Hub's cache.

    Raises ValueError, a sentence for the user, which says what to do where nothing can be fetched.
    """
    if Path(given).exists() or not looks_like_an_id(given):
        if revision is not None:
            raise ValueError(f"revision: expected only with an id on the Hub as model, got the folder {given}")
        return given
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ValueError(_not_pinned(given, revision))
    model = HubModel(id=given, commit=revision, weights=weights)
    return _in_cache(model) or _of_child(f"model: {given}", _fetched(model))


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


def _in_cache(model: HubModel) -> str | None:
    """Return the folder, if it is complete in the cache. Makes no request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(
            snapshot_download(
                model.id, revision=model.commit, allow_patterns=list(model.patterns), local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None  # what the cache lacks, or has in part, is fetched


def _of_child(subject: str, answer: Iterator[tuple[str, str]]) -> str:
    """Return what the child found. Raises ValueError with the problem. answer: yields (found, problem)."""
    answers, why = from_child(answer)
    found, problem = answers[0] if answers else ("", why)
    if problem:
        raise ValueError(f"{subject}: {problem}" if subject else problem)
    return found


def _fetched(model: HubModel) -> Iterator[tuple[str, str]]:
    """Fetch all files, in a child process, and yield the folder."""
    from huggingface_hub import constants, snapshot_download

    _as_the_environment_says()
    try:
        folder = snapshot_download(model.id, revision=model.commit, allow_patterns=list(model.patterns))
    except Exception as error:  # the library raises what its own libraries raise
        what = f"hf download {model.id} --revision {model.commit}"
        instead = (
            f"run `{what}` where there is a network, for the cache {constants.HF_HUB_CACHE}, or name a folder as model"
        )
        yield "", _problem(error, model.id, model.commit, instead)
    else:
        yield folder, ""


def _commit_of(model: str, revision: str) -> Iterator[tuple[str, str]]:
    """Yield the commit of a branch or a tag, in a child process."""
    from huggingface_hub import HfApi

    _as_the_environment_says()
    try:
        found = HfApi().model_info(model, revision=revision).sha
    except Exception as error:  # as above
        yield "", _problem(error, model, revision, "name a folder as model")
    else:
        yield str(found), ""


def _as_the_environment_says() -> None:
    """Allow the network in a child process, unless the user forbids it, and show nothing."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    constants.HF_HUB_OFFLINE = any(value.upper() in constants.ENV_VARS_TRUE_VALUES for value in values)
    disable_progress_bars()


def _problem(error: Exception, model: str, revision: str, instead: str) -> str:
    """Return a sentence, without the library's message where that might hold an address with a password, or a token."""
    from huggingface_hub import constants, errors

    where = _without_password(constants.ENDPOINT)
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


def _without_password(address: str) -> str:
    parts = urllib.parse.urlsplit(address)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def stay_offline(library: Any) -> None:
    """Keep transformers from looking on the Hub for files that a folder lacks. library: `huggingface_hub.constants`."""
    library.HF_HUB_OFFLINE = True
