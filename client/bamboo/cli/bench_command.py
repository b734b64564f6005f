"""`bamboo bench`: its flags and what it says in --help. What takes time to import is imported late."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.output_files import check_is_path
from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED
from bamboo_core.text import duration

if TYPE_CHECKING:
    from bamboo.bench.bench_run import BenchProgress
    from bamboo.bench.report import BenchPart, BenchReport

app = typer.Typer(rich_markup_mode=None)
FIRST_WIDTH = 18  # of a table's first column on the terminal
PARTS = "machine, checks, throughput, larger, trace, prices, kills, memory, profile"


@app.command("bench")
def bench(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="For report.json and report.html.")
    ] = Path("bamboo-bench"),
    parts: Annotated[
        str, typer.Option(metavar="LIST", help=f"Some of {PARTS}, with commas.", show_default="all")
    ] = PARTS,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=20, help="How often compared sides take turns.", show_default="2, quick 1"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: whether all works, not how fast.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
) -> None:
    """Measure Bamboo on this machine: its devices, throughput, prices, losses of workers, memory.

    A Llama that fits is trained on one to eight GPUs, or a small one on CPUs, in one plain PyTorch process and by
    Bamboo, in turns. Each part takes at most ten minutes, all at most an hour. The same command goes on after Ctrl-C.
    `bamboo plan --profile FOLDER/report.json` reads the measured profile.

    The exit code is 1 if bits or losses differ that have to be equal.

    Example: bamboo bench --output h100 --parts machine,checks,throughput
    """
    from bamboo.bench.bench_run import PAGE, BenchOptions, run_bench
    from bamboo.bench.execution import BenchInterrupted
    from bamboo.bench.report import BenchError, report_to_json

    check_is_path("--output", output, "a folder")
    if output.exists() and not output.is_dir():
        usage(f"--output {output}: expected a folder, and it is a file")
    chosen = _parts(parts)
    options = BenchOptions(output=output, parts=chosen, rounds=rounds or (1 if quick else 2), quick=quick)
    try:
        output.mkdir(parents=True, exist_ok=True)
        report = run_bench(options, _tell)
    except BenchError as error:
        complain(error)
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        complain(f"--output {output}: {system_reason(error)}")
        raise typer.Exit(EXIT_FAILED) from None
    except (BenchInterrupted, SystemExit):  # a signal, in a measurement or between two
        _end_line()
        complain(f"stopped; what is measured is in {output}, and the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _end_line()
    if json:
        sys.stdout.write(report_to_json(report).decode())
    else:
        _show(report)
        typer.echo(f"the page: {output / PAGE}")
    if _differs(report):
        complain("bits or losses differ that have to be equal: the report says where")
        raise typer.Exit(EXIT_FAILED)


def _parts(text: str) -> "tuple[BenchPart, ...]":
    from bamboo.bench.report import BenchPart

    wanted = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in wanted if word not in list(BenchPart)] or (not wanted and [text]):
        usage(f"--parts {unknown[0]!r}: expected some of {', '.join(BenchPart)}, with commas")
    return tuple(part for part in BenchPart if part in wanted)


def _tell(progress: "BenchProgress") -> None:
    """One line that is written over, on a terminal; else a line for each measurement."""
    left = f", at most about {duration(progress.left)} left"
    line = f"[{progress.number}/{progress.of}] {progress.what}{left}"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
    else:
        typer.echo(line, err=True)


def _end_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _show(report: "BenchReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from bamboo.bench.tables import tables
    from bamboo.profiles.files import read_devices

    console = Console()
    for one in tables(report, read_devices()):
        table = Table(title=one.title, title_justify="left", caption=one.note or None, caption_justify="left")
        for index, column in enumerate(one.columns):
            justify: Literal["left", "right"] = "right" if index and len(one.columns) > 2 else "left"
            table.add_column(column, justify=justify, overflow="fold", min_width=0 if index else FIRST_WIDTH)
        for row in one.rows:
            table.add_row(*row)
        console.print(table)


def _differs(report: "BenchReport") -> bool:
    from bamboo.bench.tables import losses_differ

    differ = any(one.bits_equal is False for one in report.results) or losses_differ(report)
    return differ or not all(report.machine.same_bits.values())
