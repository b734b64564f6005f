"""`bamboo init`, which asks for model, data, place and checkpoints, and writes a job's first files."""

import os
import re
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from bamboo.cli.dispatch import usage
from bamboo_core.complaints import system_reason
from bamboo_core.storage.local_files import whole_file

app = typer.Typer(rich_markup_mode=None)
MODEL = "Model: the folder of a model of transformers, its id on the Hub, or FILE.py:CLASS of your own"
DATA = "Data: a file of tokens or text, an .npz file, or a saved data set"
WHERE = "Where: here, or cluster"
CHECKPOINTS = "Checkpoints: a folder or a URL such as s3://bucket/job; empty for none"
HERE, CLUSTER = "here", "cluster"
FIRST_BYTES = 8
HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
OWN_MODEL: Final = re.compile(r"([A-Za-z_]\w*)(?:\.py)?:([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The user's model: their own class or function (module and class_name), or a published model (folder).

    hub_id: the id on the Hub of a published model that must first be downloaded into the folder.
    """

    module: str = ""
    class_name: str = ""
    folder: str = ""
    hub_id: str = ""


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job, and of its files.")],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=MODEL, show_default="asked")] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help=DATA, show_default="asked")] = None,
    where: Annotated[str | None, typer.Option(metavar="WHERE", help=WHERE, show_default="asked")] = None,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="URL", help=CHECKPOINTS, show_default="asked for a cluster")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a job's first files into this folder: a manifest, a task for a model of your own, and a test.

    Example: bamboo init bert --model bert-folder --data books.tokens --where cluster --checkpoints s3://bucket/bert
    """
    from bamboo.jobs.here import storage_url

    found = _model(_asked("--model", model, MODEL), name)
    path = Path(_asked("--data", data, DATA)).expanduser()
    kind = _kind(path)
    place = _asked("--where", where, WHERE, default=HERE)
    if place not in (HERE, CLUSTER):
        usage(f"--where {place[:80]!r}: expected {HERE} or {CLUSTER}")
    kept = checkpoints
    if kept is None:
        kept = _asked("--checkpoints", None, CHECKPOINTS, default="") if place == CLUSTER else ""
    url = storage_url(os.path.expanduser(kept)) if kept else ""
    module, manifest = name.replace("-", "_"), f"{name}.yaml"
    made = {
        manifest: _manifest(name, module, found, path.absolute(), kind, place, url),
        f"test_{module}.py": _filled("test", name=name),
    }
    if found.module:
        made[f"{module}_task.py"] = _filled("task", name=name, model_module=found.module, model_name=found.class_name)
    _check(manifest, made[manifest])
    existing = [file for file in made if Path(file).exists()]
    if existing and not force:
        usage(f"{' and '.join(existing)}: already there; --force replaces what is there")
    for file, text in made.items():
        try:
            with whole_file(Path(file)) as written:
                written.write(text.encode())
        except OSError as error:
            usage(f"cannot write {file}: {system_reason(error)}")
    typer.echo(f"written: {', '.join(made)}; then")
    if found.hub_id:
        typer.echo(
            f"  on a machine with a network, once: save {found.hub_id} into {found.folder} (docs/huggingface.md)"
        )
    typer.echo(f"  bamboo validate --load {manifest}\n  python -m pytest test_{module}.py")
    if place == HERE:
        typer.echo(f"  bamboo run {manifest} --output trained")
    else:
        typer.echo(f"  in {manifest}: your image, and where its pods have the data (docs/images.md)")
        typer.echo(f"  bamboo submit {manifest}")


def _model(answer: str, name: str) -> _Model:
    """Parse the user's answer about the model. name: the job's name. A mistake ends the command."""
    if Path(answer).is_dir():
        return _Model(folder=answer)
    if match := OWN_MODEL.fullmatch(answer):
        if not Path(f"{match[1]}.py").is_file():
            usage(f"--model {answer}: there is no {match[1]}.py in this folder, where the workers look for it")
        return _Model(module=match[1], class_name=match[2])
    if HUB_ID.fullmatch(answer):
        return _Model(folder=f"{name}-model", hub_id=answer)
    usage(
        f"--model {answer[:80]!r}: expected the folder of a model of transformers, the id of one on the Hub"
        " (ORGANIZATION/NAME), or FILE.py:CLASS for a module of your own"
    )


def _asked(flag: str, given: str | None, question: str, default: str | None = None) -> str:
    """Return the flag's value, or ask for it. Without a terminal, return the default; None ends the command."""
    if given is not None:
        return given
    if sys.stdin.isatty():
        answer: str = typer.prompt(question, default=default, show_default=False)
        return answer.strip()
    if default is None:
        usage(f"{flag}: expected it, since there is no terminal on which to ask; {question}")
    return default


def _kind(path: Path) -> str:
    """Return the kind of the data at a path: tokens, huggingface, npz or text. A mistake ends the command."""
    try:
        inside = {one.name: one for one in sorted(path.iterdir())} if path.is_dir() else {}
        first = next(filter(Path.is_file, inside.values()), None) if path.is_dir() else path
        begins = b""
        if first is not None:
            with first.open("rb") as file:
                begins = file.read(FIRST_BYTES)
    except OSError as error:
        usage(f"--data {path}: {system_reason(error)}")
    if path.is_dir() and not inside:
        usage(f"--data {path}: the folder is empty")
    if begins.startswith(b"BAMBOOTK"):
        return "tokens"
    if "dataset_info.json" in inside or "dataset_dict.json" in inside:
        return "huggingface"
    if path.suffix == ".npz":
        return "npz"
    if not inside:
        return "text"
    usage(
        f"--data {str(path)[:80]!r}: expected a file of tokens (bamboo tokenize makes it) or of text, an .npz file,"
        " or a data set that Hugging Face's datasets has saved"
    )


def _manifest(name: str, module: str, model: _Model, data: Path, kind: str, place: str, checkpoints: str) -> str:
    """Return the text of the job's manifest. kind: the kind of the data. checkpoints: a URL; "" for none."""
    length = ", length: 128" if kind in ("tokens", "text") else ""
    config = [f"data: {{kind: {kind}, path: {_quoted(str(data))}{length}}}"]
    entrypoint = f"{module}_task:build"
    if model.folder:
        entrypoint = "bamboo_trainer.models.huggingface:build"
        config = [f"model: {_quoted(model.folder)}", *config, "learningRate: 2.0e-5"]
    checkpoint = ""
    if checkpoints:
        why = "  # From where a suspended or restarted job goes on; the last one has the weights."
        checkpoint = f"{why}\n  checkpoint:\n    storage: {_quoted(checkpoints)}\n"
    lines = "\n".join(f"      {line}" for line in config)
    return _filled(
        "manifest", name=name, entrypoint=entrypoint, config=lines, checkpoint=checkpoint, place=_filled(place)
    )


def _quoted(text: str) -> str:
    """Return a text quoted for YAML on one line."""
    return "'" + text.replace("'", "''") + "'"


def _filled(template: str, **values: str) -> str:
    text = (resources.files("bamboo.cli") / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(values)


def _check(name: str, text: str) -> None:
    """End the command if the text is not a valid manifest. name: its file, for errors."""
    from bamboo_core.job.manifest import ManifestError, parse_manifest
    from bamboo_core.job.yaml_file import source_of

    try:
        parse_manifest(source_of(name, text).document)
    except ManifestError as error:
        usage(*map(str, error.problems))
