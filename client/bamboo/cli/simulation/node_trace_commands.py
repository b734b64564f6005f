"""The commands on traces of nodes: their flags and --help. What takes time to import is imported late."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.output_files import Written
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo.traces.generate import Generation, Pattern, generate
from bamboo.traces.json_lines import to_json_lines
from bamboo.traces.trace import NodeTraceError, Trace
from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED
from bamboo_core.option_groups import grouped
from bamboo_core.storage.durable import whole_file

node_traces = typer.Typer(
    help="Look at recordings of spot nodes, convert and generate them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="Recordings (docs/traces.md); several become one trace."),
]
Zone = Annotated[
    str, typer.Option(metavar="NAME", help="Zone of nodes whose file names none.", show_default="not known")
]


@node_traces.command()
def show(
    files: Files,
    zone: Zone = "",
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show what a trace says: nodes, removals, lifetimes, zones, prices.

    Example: bamboo traces show p3-trace.csv
    """
    from rich.console import Console

    from bamboo.terminal.node_trace_table import trace_document, trace_table
    from bamboo.traces.summary import summarize

    trace = _read(files, zone)
    summary = summarize(trace)
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(trace_document(trace, summary), indent=2))
    else:
        wide = None if sys.stdout.isatty() else 1000
        Console(highlight=False, soft_wrap=True, width=wide).print(trace_table(trace, summary))


@node_traces.command()
def convert(files: Files, zone: Zone = "", output: Written = None) -> None:
    """Write recordings as one trace in Bamboo's own form, JSON lines with zones, notices and prices.

    Example: bamboo traces convert p3-trace.csv --zone us-east-1a --output trace.jsonl
    """
    _write(to_json_lines(_read(files, zone)), output)


def _read(files: list[str], zone: str) -> Trace:
    from bamboo.traces.files import read_traces

    try:
        return read_traces(files, zone)
    except NodeTraceError as error:
        usage(str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What is generated, as the user gave it."""

    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all random choices.")] = 0
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes that are wanted, and there at the beginning.")] = 16
    hours: Annotated[float, typer.Option(metavar="H", help="How long the trace is.")] = 24.0
    removal: Annotated[
        float, typer.Option(metavar="P", help="Probability that a node is taken away within an hour, the mean.")
    ] = 0.1
    addition: Annotated[
        float, typer.Option(metavar="P", help="Probability that a missing node is replaced within an hour.")
    ] = 0.5
    zones: Annotated[str, typer.Option(metavar="NAMES", help="Zones over which the nodes are spread, with commas.")] = (
        "zone-a"
    )
    notice: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Notice before each removal.", show_default="none")
    ] = None
    batch: Annotated[
        float, typer.Option(metavar="SHARE", help="zones: the share of a zone's nodes that goes at once.")
    ] = 0.5
    price: Annotated[
        float | None, typer.Option(metavar="USD", help="Price of a node hour.", show_default="no prices")
    ] = None
    volatility: Annotated[
        float, typer.Option(metavar="SHARE", help="How far prices move, as a share of the price.")
    ] = 0.0

    def generation(self, pattern: Pattern) -> Generation:
        return Generation(
            pattern=pattern,
            nodes=self.nodes,
            hours=self.hours,
            removal=self.removal,
            addition=self.addition,
            zones=tuple(zone.strip() for zone in self.zones.split(",")),
            notice=self.notice,
            batch=self.batch,
            price=self.price,
            volatility=self.volatility,
        )


@node_traces.command("generate")
@grouped
def generate_trace(
    pattern: Annotated[Pattern, typer.Argument(help="How nodes are taken away.")],
    output: Written = None,
    *,
    options: GenerateOptions,
) -> None:
    """Make a trace up, the same for the same seed.

    hourly: each node by itself. zones: many of a zone at once.

    Example: bamboo traces generate zones --nodes 48 --zones a,b,c --removal 0.1 --seed 7 --output trace.jsonl
    """
    try:
        lines = to_json_lines(generate(options.generation(pattern), options.seed))
    except NodeTraceError as error:
        usage(str(error))
    _write(lines, output)


def _write(lines: Iterable[str], output: Path | None) -> None:
    """Writes the lines to the file, or to standard output if there is none. A file that cannot be written ends the
    command.
    """
    if output is None:
        sys.stdout.writelines(lines)
        return
    try:
        with whole_file(output) as file:
            file.writelines(line.encode() for line in lines)
    except OSError as error:
        complain(f"cannot write {output}: {system_reason(error)}")
        raise typer.Exit(EXIT_FAILED) from None
