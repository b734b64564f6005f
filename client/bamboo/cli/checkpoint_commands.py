"""`bamboo checkpoints` and `bamboo export`: their flags and --help. Slow imports happen late."""

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo.cli.dispatch import print_table, usage
from bamboo.cli.output_files import check_is_path
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from bamboo_core.checkpoint.selection import ListedCheckpoint
    from bamboo_core.checkpoint.store import CheckpointStore

app = typer.Typer(rich_markup_mode=None)


class ExportFormat(StrEnum):
    """Formats of an exported checkpoint: one safetensors file, or a folder for Hugging Face transformers."""

    SAFETENSORS = "safetensors"
    HUGGINGFACE = "huggingface"


Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The folder of a job's checkpoints: a path, s3://bucket/folder, gs://bucket/folder or"
        " az://container/folder.",
        show_default=False,
    ),
]


@app.command()
def checkpoints(
    url: Url,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read every committed checkpoint, and name each file that is not what was written. The exit code is 1"
            " if one is damaged or cannot be read.",
        ),
    ] = False,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only checkpoints of this step.", show_default="all")
    ] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """List the checkpoints in a folder or an object store, the newest first.

    Damaged checkpoints are listed, too, with the reason. Without --verify only manifests are read.

    Example: bamboo checkpoints s3://bucket/llama
    """
    from bamboo_core.checkpoint.selection import ListedState
    from bamboo_core.checkpoint.store import CheckpointStore
    from bamboo_core.storage.bounded import StorageError

    _check_url(url)
    bad, store = False, CheckpointStore(url)
    try:
        found = [one for one in store.list() if step is None or one.attempt.step == step]
        if verify:
            found = [one for one in found if one.state is not ListedState.UNFINISHED]
            bad = _verify(store, found, output)
        else:
            _list(found, output)
    except StorageError as error:
        complain(error)
        raise typer.Exit(EXIT_FAILED) from None
    if not found and output is OutputFormat.TEXT:
        typer.echo("no checkpoints" if step is None else f"no checkpoint of step {step}", err=True)
    missing = step is not None and not found
    raise typer.Exit(EXIT_FAILED if bad or missing else EXIT_OK)


def _list(found: "list[ListedCheckpoint]", output: OutputFormat) -> None:
    from bamboo.terminal.checkpoint_table import document, table

    if output is OutputFormat.JSON:
        typer.echo(json.dumps([document(one) for one in found], indent=2))
    elif found:
        print_table(lambda width: table(found, time.time()))


def _verify(store: "CheckpointStore", found: "list[ListedCheckpoint]", output: OutputFormat) -> bool:
    """Verify the files of each checkpoint and print the result. Return whether any checkpoint has a problem."""
    from bamboo.terminal.checkpoint_table import document

    documents, bad = [], False
    for one in found:
        problems = _problems(store, one)
        bad = bad or bool(problems)
        documents.append({**document(one), "problems": problems})
        if output is OutputFormat.TEXT:
            _print_verified(one, problems)
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(documents, indent=2))
    return bad


@app.command()
def export(
    url: Url,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File to write; a folder for huggingface.",
            show_default=False,
        ),
    ],
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: one file for any of its readers; huggingface: a folder for transformers.",
        ),
    ] = ExportFormat.SAFETENSORS,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The checkpoint of this step.", show_default="the newest")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For huggingface: the job's manifest, which names the model.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For huggingface: where the model's folder is here.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at PATH.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False,
) -> None:
    """Export the weights of a checkpoint or a run to one file, or to a folder for transformers.

    Parameters and buffers keep the names of the module that from_module has split; without from_module they are named
    "layers.NUMBER.NAME". The optimizer's state is left out.

    The format huggingface is for models trained with bamboo_trainer.models.huggingface. It writes a folder for
    from_pretrained of transformers.

    Example: bamboo export s3://bucket/llama --output llama.safetensors
    """
    from bamboo.local.trainer_calls.trainer_process import run_trainer

    check_is_path("--output", output, "a file" if form is ExportFormat.SAFETENSORS else "a folder")
    _check_url(url)
    options = {"output": output, "format": form, "step": step, "job": job, "model": model}
    raise typer.Exit(run_trainer("an export", "export", url, **options, force=force, quiet=quiet))


def _check_url(url: str) -> None:
    """End the command with a usage error if the URL is malformed, has credentials, or names an unsupported store."""
    from bamboo_core.storage.url import parse_url

    try:
        parse_url(url)
    except ValueError as error:
        usage(str(error))


def _problems(store: "CheckpointStore", one: "ListedCheckpoint") -> list[str]:
    """Return a checkpoint's problems: an unreadable manifest, damaged files or a failing store. [] if it is sound."""
    from bamboo_core.checkpoint.selection import ListedState
    from bamboo_core.storage.bounded import StoreUnavailable

    if one.manifest is None or one.state is ListedState.UNREADABLE:
        return [one.reason]
    try:
        return [problem for part, problem in store.verify(one.manifest) if problem]
    except StoreUnavailable as error:
        return [str(error)]


def _print_verified(one: "ListedCheckpoint", problems: list[str]) -> None:
    from bamboo_core.text import count, printable, size

    if not problems:
        layers = count(len(one.manifest.layers), "layer") if one.manifest else ""
        typer.echo(f"step {one.attempt.step}: {one.attempt.folder} is sound: {layers}, {size(one.bytes)}")
    for problem in problems:
        typer.echo(f"step {one.attempt.step}: {printable(problem)}")
