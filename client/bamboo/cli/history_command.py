"""The command `bamboo history`, which prints and follows the history of a job."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bamboo.cli import options
from bamboo.cli.dispatch import run, usage
from bamboo.terminal.output_format import OutputFormat
from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED, EXIT_OK
from bamboo_core.option_groups import grouped

if TYPE_CHECKING:
    from bamboo.remote.session import Session, Target
    from bamboo_core.history.records import Record

app = typer.Typer(rich_markup_mode=None)
SOURCES: Final = (
    "the name of a job on the cluster, a manifest, the folder or URL of an output or checkpoints, or history.jsonl"
)


@app.command()
@grouped
def history(
    cluster: options.ClusterOptions,
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB|PATH|URL",
            help="A job on the cluster, the folder or URL of its checkpoints, the output of a run, or a history.jsonl.",
            autocompletion=options.complete_jobs,
            show_default=False,
        ),
    ],
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="json: a line for each record.")
    ] = OutputFormat.TEXT,
    every: Annotated[
        bool, typer.Option("--all", help="Also steps that were repeated after going back to a checkpoint.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until Ctrl-C.")] = False,
    interval: options.Interval = options.INTERVAL,
) -> None:
    """Show the steps, evaluations and events of a job.

    The history of a job on the cluster is read from its object store, with this machine's credentials.

    Example: bamboo history run --output json
    """
    from bamboo.remote.session import target as job_target
    from bamboo_core.kube.errors import RemoteError

    def show(source: str) -> int:
        return _show(_reader(source), output, every, follow, interval)

    place = Path(source)
    if not ("://" in source or place.is_dir() or place.suffix == ".jsonl"):
        try:
            target = job_target(source)
        except RemoteError as error:
            usage(str(error) if place.is_file() else f"{source}: there is nothing; expected {SOURCES}")
        run(cluster, lambda s: _of_job(s, target, show))
    raise typer.Exit(show(_file_in(source) if "://" not in source and place.is_dir() else source))


def _file_in(folder: str) -> str:
    """Return a folder's history.jsonl, or the folder itself if it lacks that file or has a subfolder `history`."""
    from bamboo.local.history_end import FILE
    from bamboo_core.history.files import FOLDER

    file = Path(folder, FILE)
    return str(file) if file.is_file() and not Path(folder, FOLDER).exists() else folder


def _reader(source: str) -> "Callable[[], list[Record]]":
    """Return a function that reads the whole history from a .jsonl file, or from a folder or URL.

    The returned function raises HistoryError, StorageError, ValueError.
    """
    from bamboo_core.history.files import find
    from bamboo_core.history.records import HistoryError, from_lines

    def file() -> "list[Record]":
        try:
            return from_lines(Path(source).read_bytes(), source)
        except OSError as error:
            raise HistoryError(f"cannot read {source}: {system_reason(error)}") from None

    return file if source.endswith(".jsonl") and "://" not in source else lambda: find(source).read_all()


async def _of_job(session: "Session", target: "Target", show: Callable[[str], int]) -> int:
    import asyncio

    from bamboo.remote.operations import history_place
    from bamboo_core.view.job_view import view_of

    place = history_place(view_of(await session.api.job(*session.of(target))))
    return await asyncio.to_thread(show, place)


def _show(read: "Callable[[], list[Record]]", form: OutputFormat, every: bool, follow: bool, interval: float) -> int:
    from bamboo.terminal.history_lines import line
    from bamboo_core.history.merge import merged, newest
    from bamboo_core.history.records import BEGINNING, HistoryError, to_line
    from bamboo_core.storage.bounded import StorageError

    shown: set[object] = set()
    begun = form is not OutputFormat.JSON
    while True:
        try:
            records = merged(read())
        except (HistoryError, StorageError, ValueError) as error:
            complain(error)
            return EXIT_FAILED
        if not every:
            records = newest(records)
        if not begun:
            print(BEGINNING.decode(), end="", flush=True)
            begun = True
        for record in records:
            key = _key(record)
            if key not in shown:
                shown.add(key)
                print(
                    to_line(record).decode() if form is OutputFormat.JSON else f"{line(record)}\n", end="", flush=True
                )
        if not follow:
            return EXIT_OK
        time.sleep(interval)


def _key(record: "Record") -> object:
    """Return a key that identifies the record each time the history is read."""
    from bamboo_core.history.records import EventRecord

    if isinstance(record, EventRecord):
        return record.source, record.number
    return type(record), record.attempt, record.step
