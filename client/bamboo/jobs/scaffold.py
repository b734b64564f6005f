"""The files that `bamboo init` writes: a manifest, a task for a user's own model, and a test, from templates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Final

from bamboo.jobs.errors import InvalidRequest

HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
OWN_MODEL: Final = re.compile(r"([A-Za-z_]\w*)(?:\.py)?:([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A user's class or function that builds a module, in a Python file next to the manifest."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model of Hugging Face transformers: its folder, and its id on the Hub if it must be downloaded first."""

    folder: str
    hub_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswers:
    """The user's answers to the questions of `bamboo init`.

    data: a file or folder, of the kind `data_kind` in docs/data.md. cluster: the job is for a cluster, not for this
    machine. checkpoints: a URL; "": none.
    """

    name: str
    model: OwnModel | PublishedModel
    data: str
    data_kind: str
    cluster: bool
    checkpoints: str


def model_of(answer: str, *, is_folder: bool, name: str) -> OwnModel | PublishedModel:
    """Parse the user's answer about the model. is_folder: a folder of that name exists. Raises InvalidRequest."""
    if is_folder:
        return PublishedModel(folder=answer)
    if match := OWN_MODEL.fullmatch(answer):
        return OwnModel(module=match[1], name=match[2])
    if HUB_ID.fullmatch(answer):
        return PublishedModel(folder=f"{name}-model", hub_id=answer)
    raise InvalidRequest(
        f"--model {answer[:80]!r}: expected the folder of a model of transformers, the id of one on the Hub"
        " (ORGANIZATION/NAME), or FILE.py:CLASS for a module of your own"
    )


def files(answers: JobAnswers) -> dict[str, str]:
    """Return the texts of the job's first files by file name, the manifest first."""
    module, model = _module(answers.name), answers.model
    made = {f"{answers.name}.yaml": _manifest(answers), f"test_{module}.py": _filled("test", name=answers.name)}
    if isinstance(model, OwnModel):
        made[f"{module}_task.py"] = _filled("task", name=answers.name, model_module=model.module, model_name=model.name)
    return made


def next_steps(answers: JobAnswers) -> list[str]:
    """Return the user's next steps, as commands and sentences."""
    steps = []
    if isinstance(answers.model, PublishedModel) and answers.model.hub_id:
        folder, hub_id = answers.model.folder, answers.model.hub_id
        steps.append(f"on a machine with a network, once: save {hub_id} into {folder} (docs/huggingface.md)")
    steps += [f"bamboo validate --load {answers.name}.yaml", f"python -m pytest test_{_module(answers.name)}.py"]
    if not answers.cluster:
        return [*steps, f"bamboo run {answers.name}.yaml --output trained"]
    return [
        *steps,
        f"in {answers.name}.yaml: your image, and where its pods have the data (docs/images.md)",
        f"bamboo submit {answers.name}.yaml",
    ]


def _module(name: str) -> str:
    return name.replace("-", "_")


def _manifest(answers: JobAnswers) -> str:
    model, length = answers.model, ", length: 128" if answers.data_kind in ("tokens", "text") else ""
    config = [f"data: {{kind: {answers.data_kind}, path: {_quoted(answers.data)}{length}}}"]
    entrypoint = f"{_module(answers.name)}_task:build"
    if isinstance(model, PublishedModel):
        entrypoint = "bamboo_trainer.models.huggingface:build"
        config = [f"model: {_quoted(model.folder)}", *config, "learningRate: 2.0e-5"]
    checkpoint = ""
    if answers.checkpoints:
        why = "  # From where a suspended or restarted job goes on; the last one has the weights."
        checkpoint = f"{why}\n  checkpoint:\n    storage: {_quoted(answers.checkpoints)}\n"
    lines = "\n".join(f"      {line}" for line in config)
    place = _filled("cluster" if answers.cluster else "here")
    return _filled(
        "manifest", name=answers.name, entrypoint=entrypoint, config=lines, checkpoint=checkpoint, place=place
    )


def _quoted(text: str) -> str:
    """Return a text quoted for YAML on one line."""
    return "'" + text.replace("'", "''") + "'"


def _filled(template: str, **values: str) -> str:
    text = (resources.files("bamboo.jobs") / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(values)


def read_kind(path: str, begins: bytes, names: Mapping[str, bool]) -> str:
    """Return the kind of data at a path, as in docs/data.md. Raises InvalidRequest.

    begins: first bytes of the file, or of a file in the folder. names: entries of the folder, and whether each is a
    folder; {} for a file.
    """
    if begins.startswith(b"BAMBOOTK"):
        return "tokens"
    if "dataset_info.json" in names or "dataset_dict.json" in names:
        return "huggingface"
    if path.endswith(".npz"):
        return "npz"
    if not names:
        return "text"
    raise InvalidRequest(
        f"--data {path[:80]!r}: expected a file of tokens (bamboo tokenize makes it) or of text, an .npz file,"
        " or a data set that Hugging Face's datasets has saved"
    )
