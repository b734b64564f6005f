"""`bamboo traces FILE...`: its flags and --help. Slow imports happen late."""

import json
import sys
from typing import Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo.terminal.output_format import Output, OutputFormat

app = typer.Typer()


@app.command()
def traces(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Recordings (docs/traces.md); several become one trace."),
    ],
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show what a recording of spot nodes says: nodes, removals, lifetimes, zones, prices.

    Example: bamboo traces p3-trace.csv
    """
    from rich.console import Console

    from bamboo.terminal.node_trace_table import trace_document, trace_table
    from bamboo.traces.files import read_traces
    from bamboo.traces.summary import summarize
    from bamboo.traces.trace import NodeTraceError

    try:
        trace = read_traces(files)
    except NodeTraceError as error:
        usage(str(error))
    summary = summarize(trace)
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(trace_document(trace, summary), indent=2))
    else:
        wide = None if sys.stdout.isatty() else 1000
        Console(highlight=False, soft_wrap=True, width=wide).print(trace_table(trace, summary))
