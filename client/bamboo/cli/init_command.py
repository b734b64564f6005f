"""`bamboo init`: asks for model, data, place and checkpoints, and writes a job's first files. Slow imports are late."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo_core.complaints import system_reason
from bamboo_core.storage.local_files import whole_file

if TYPE_CHECKING:
    from bamboo.jobs.scaffold import JobAnswers

app = typer.Typer(rich_markup_mode=None)
MODEL = "Model: the folder of a model of transformers, its id on the Hub, or FILE.py:CLASS of your own"
DATA = "Data: a file of tokens or text, an .npz file, or a saved data set"
WHERE = "Where: here, or cluster"
CHECKPOINTS = "Checkpoints: a folder or a URL such as s3://bucket/job; empty for none"
HERE, CLUSTER = "here", "cluster"
FIRST_BYTES = 8


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
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.scaffold import files, next_steps

    try:
        answers = _answers(name, model, data, where, checkpoints)
        made = files(answers)
        _check(made)
    except InvalidRequest as error:
        usage(*str(error).split("\n"))
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
    for line in next_steps(answers):
        typer.echo(f"  {line}")


def _answers(
    name: str, model: str | None, data: str | None, where: str | None, checkpoints: str | None
) -> "JobAnswers":
    """Return the answers that the flags give; ask the user for the others. Raises InvalidRequest."""
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.here import storage_url
    from bamboo.jobs.scaffold import JobAnswers, OwnModel, model_of

    answer = _asked("--model", model, MODEL)
    known = model_of(answer, is_folder=Path(answer).is_dir(), name=name)
    if isinstance(known, OwnModel) and not Path(f"{known.module}.py").is_file():
        raise InvalidRequest(
            f"--model {answer}: there is no {known.module}.py in this folder, where the workers look for it"
        )
    path = Path(_asked("--data", data, DATA)).expanduser()
    kind = _kind(path)
    place = _asked("--where", where, WHERE, default=HERE)
    if place not in (HERE, CLUSTER):
        raise InvalidRequest(f"--where {place[:80]!r}: expected {HERE} or {CLUSTER}")
    kept = checkpoints
    if kept is None:
        kept = _asked("--checkpoints", None, CHECKPOINTS, default="") if place == CLUSTER else ""
    url = storage_url(os.path.expanduser(kept)) if kept else ""
    return JobAnswers(
        name=name,
        model=known,
        data=str(path.absolute()),
        data_kind=kind,
        cluster=place == CLUSTER,
        checkpoints=url,
    )


def _asked(flag: str, given: str | None, question: str, default: str | None = None) -> str:
    """Return the flag's value, or else ask for it. Without a terminal, return the default, or end the command."""
    if given is not None:
        return given
    if sys.stdin.isatty():
        answer: str = typer.prompt(question, default=default, show_default=False)
        return answer.strip()
    if default is None:
        usage(f"{flag}: expected it, since there is no terminal on which to ask; {question}")
    return default


def _kind(path: Path) -> str:
    """Detect the kind of the data at a path, such as "tokens" or "npz" (docs/data.md). Raises InvalidRequest."""
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.scaffold import read_kind

    try:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        files = [one for one in inside if one.is_file()] if path.is_dir() else [path]
        begins = b""
        if files:
            with files[0].open("rb") as file:
                begins = file.read(FIRST_BYTES)
    except OSError as error:
        raise InvalidRequest(f"--data {path}: {system_reason(error)}") from None
    if path.is_dir() and not inside:
        raise InvalidRequest(f"--data {path}: the folder is empty")
    return read_kind(str(path), begins, {one.name: one.is_dir() for one in inside})


def _check(made: dict[str, str]) -> None:
    """Raise InvalidRequest if the manifest, the first of the files, is not valid. made: text by file name."""
    from bamboo.jobs.errors import InvalidRequest
    from bamboo_core.job.manifest import ManifestError, parse_manifest
    from bamboo_core.job.yaml_file import source_of

    name, text = next(iter(made.items()))
    try:
        parse_manifest(source_of(name, text).document)
    except ManifestError as error:
        raise InvalidRequest("\n".join(map(str, error.problems))) from None
