"""What the commands that simulate share: rates, seeds and recordings as flags, and the forms of what they print."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo.cli.dispatch import refuse_beside, usage

if TYPE_CHECKING:
    from bamboo.terminal.simulation_table import Case

MOST_SEEDS = 1_000_000
MOST_HOURS = 87_600


class SimulationFormat(StrEnum):
    """The forms in which results of simulations are printed."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Which nodes come and go, as the user gave it."""

    preempt_rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="P", help="Probability that a node is taken away within an hour. May be given several times."
        ),
    ] = None
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Instead a recording of nodes, of any form of docs/traces.md. May be given several times, for instance"
            " with a recording of prices.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOptions:
    """How long runs last, and what the market of their nodes is like, as the user gave it."""

    hours: Annotated[
        float | None,
        typer.Option(metavar="H", help="Cut runs after this time.", show_default="the trace's, else 24"),
    ] = None
    replace_rate: Annotated[
        float,
        typer.Option(metavar="P", help="Probability that a node that was taken away is replaced within an hour."),
    ] = 0.5
    zone_traffic_price: Annotated[
        float,
        typer.Option(metavar="USD", help="Price of a GB that crosses zones, each way; 0 if the cloud bills none."),
    ] = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How results are shown, as the user gave it."""

    output: Annotated[SimulationFormat, typer.Option("--output", "-o", help="Output format.")] = SimulationFormat.TEXT
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False


def rates_of(ctx: typer.Context, nodes: NodeOptions, made_up: Sequence[str]) -> tuple[float, ...]:
    """The rates of made-up preemptions; none if there is a recording.

    made_up: the other options that mean nothing with a recording. A mistake ends the command.
    """
    if nodes.trace:
        refuse_beside(ctx, ("preempt_rate", "seeds", *made_up), "--trace")
        return ()
    if not nodes.preempt_rate:
        usage("--preempt-rate or --trace: expected one of them")
    for rate in nodes.preempt_rate:
        check_probability("--preempt-rate", rate)
    return tuple(nodes.preempt_rate)


def check_probability(flag: str, value: float) -> None:
    """Ends the command if it is none."""
    if not 0 <= value <= 1:
        usage(f"{flag} {value:g}: expected a probability from 0 to 1")


def check_hours(hours: float | None) -> None:
    """Ends the command if a run could not take so long."""
    if hours is not None and not 0 < hours <= MOST_HOURS:
        usage(f"--hours must be more than 0 and at most {MOST_HOURS}, not {hours:g}")


def check_market(market: MarketOptions) -> None:
    """Ends the command if one of the numbers cannot be."""
    check_hours(market.hours)
    check_probability("--replace-rate", market.replace_rate)
    if not 0 <= market.zone_traffic_price <= 1000:
        usage(f"--zone-traffic-price {market.zone_traffic_price:g}: expected USD from 0 to 1000")


def seeds_of(text: str) -> range:
    """N: from 1 to N; A:B: from A to B. A mistake ends the command."""
    first, colon, last = text.partition(":")
    numbers = [first, last] if colon else ["1", first]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers):
        usage(f"--seeds must be a number of seeds or A:B, not {text[:40]!r}")
    seeds = range(int(numbers[0]), int(numbers[1]) + 1)
    if not 1 <= len(seeds) <= MOST_SEEDS:
        usage(f"--seeds must name from 1 to {MOST_SEEDS} seeds, not {text[:40]!r}")
    return seeds


def print_cases(cases: "list[Case]", form: SimulationFormat, over_time: "list[dict[str, Any]] | None" = None) -> None:
    """Prints the cases in that form. over_time: of each case, for JSON."""
    from rich.console import Console

    from bamboo.terminal.simulation_table import simulation_csv, simulation_documents, simulation_table

    if form is SimulationFormat.JSON:
        typer.echo(json.dumps(simulation_documents(cases, over_time), indent=2))
    elif form is SimulationFormat.CSV:
        typer.echo(simulation_csv(cases), nl=False)
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
        console.print(simulation_table(cases, console.width))
