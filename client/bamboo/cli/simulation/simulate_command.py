"""`bamboo simulate`: its flags and what it says in --help. What takes time to import is imported late."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo.cli.dispatch import refuse_beside, usage
from bamboo.cli.output_files import check_plot
from bamboo.cli.simulation.job_file import job_of
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.option_groups import grouped

if TYPE_CHECKING:
    from bamboo.terminal.simulation_table import Case

app = typer.Typer(rich_markup_mode=None)


MOST_SEEDS = 1_000_000
MOST_HOURS = 87_600


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The command's flags as the user gave them."""

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
            help="Instead a recording of nodes (docs/traces.md). May be given several times.",
        ),
    ] = None
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
    seeds: Annotated[
        str, typer.Option(metavar="N|A:B", help="Number of seeds, from 1 on; or the seeds from A to B.")
    ] = "10"
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Steps of a run.", show_default="the job's")] = (
        None
    )
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="What `bamboo profile` wrote, a profile of Bamboo's, or @NAME of a GPU (docs/simulator.md).",
        ),
    ] = None
    notice: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Notice before made-up preemptions.", show_default="none"),
    ] = None
    zones: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Zones of made-up nodes, with commas.",
            show_default="those that the job names, else zone-a",
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            metavar="USD",
            help="Price of a spot node and hour.",
            show_default="the trace's, else the job's, else the profile's",
        ),
    ] = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the runs over time, as PNG.")] = None
    events: Annotated[bool, typer.Option("--events", help="Print what happens on standard error; for one run.")] = False
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes.", show_default="as many as processors")
    ] = None
    output: Output = OutputFormat.TEXT
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False


@app.command()
@grouped
def simulate(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    *,
    options: SimulateOptions,
) -> None:
    """Train a job in virtual time under preemptions.

    The job's own coordinator decides; a profile says how long everything takes.

    Example: bamboo simulate job.yaml --profile profile.json --preempt-rate 0.1 --preempt-rate 0.5 --plot runs.png
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.simulating import JobSimulation, money_told, simulated
    from bamboo.simulation.figures import SimulationError, spread
    from bamboo.terminal.simulation_table import over_time_document

    if options.profile is None:
        from bamboo.profiles.files import shipped_names

        known = ", ".join(shipped_names())
        usage(f"--profile: expected a file that `bamboo profile {job}` writes, or one of {known}")
    rates = _rates(ctx, options)
    _check_numbers(options)
    check_plot("--plot", options.plot)
    wanted = JobSimulation(
        job=job_of(job),
        profile=options.profile,
        traces=tuple(options.trace or ()),
        rates=rates,
        seeds=_seeds(options.seeds),
        hours=options.hours,
        steps=options.steps,
        replace_rate=options.replace_rate,
        notice=options.notice,
        zones=() if options.zones is None else tuple(zone.strip() for zone in options.zones.split(",")),
        price=options.price,
        zone_price=options.zone_traffic_price,
        jobs=options.jobs,
        say=(lambda line: print(line, file=sys.stderr)) if options.events else None,
        shown=not options.quiet,
    )
    try:
        found = simulated(wanted)
    except InvalidRequest as error:
        usage(str(error))
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.plot is not None:
        from bamboo.simulation.plots import draw

        try:
            draw([(one.name, one.runs) for one in found.cases], f"{job.name} on {options.profile}", options.plot)
        except SimulationError as error:
            usage(str(error))
    cases = [(one.name, spread([run.figures for run in one.runs])) for one in found.cases]
    over_time = [over_time_document([run.series for run in one.runs]) for one in found.cases]
    _print(cases, over_time, options.output)
    for one in found.cases:
        for text in sorted({run.message for run in one.runs if run.outcome not in ("cut", "Complete")}):
            ended = sum(run.message == text for run in one.runs)
            print(f"{one.name}: {ended} of {len(one.runs)} ended: {text}", file=sys.stderr)
        if text := money_told(found.spec, one.runs):
            print(f"{one.name}: {text}", file=sys.stderr)


def _rates(ctx: typer.Context, options: SimulateOptions) -> tuple[float, ...]:
    """Return the rates of made-up preemptions; none if there is a recording. A mistake ends the command."""
    if options.trace:
        refuse_beside(ctx, ("preempt_rate", "seeds", "replace_rate", "notice", "zones"), "--trace")
        return ()
    if not options.preempt_rate:
        usage("--preempt-rate or --trace: expected one of them")
    for rate in options.preempt_rate:
        _check_probability("--preempt-rate", rate)
    return tuple(options.preempt_rate)


def _check_probability(flag: str, value: float) -> None:
    if not 0 <= value <= 1:
        usage(f"{flag} {value:g}: expected a probability from 0 to 1")


def _check_numbers(options: SimulateOptions) -> None:
    if options.hours is not None and not 0 < options.hours <= MOST_HOURS:
        usage(f"--hours must be more than 0 and at most {MOST_HOURS}, not {options.hours:g}")
    _check_probability("--replace-rate", options.replace_rate)
    if not 0 <= options.zone_traffic_price <= 1000:
        usage(f"--zone-traffic-price {options.zone_traffic_price:g}: expected USD from 0 to 1000")
    if options.notice is not None and not 0 <= options.notice <= 86_400:
        usage(f"--notice {options.notice:g}: expected seconds from 0 to 86400")
    if options.price is not None and not 0 <= options.price <= 1e6:
        usage(f"--price {options.price:g}: expected USD from 0 to 1000000")


def _seeds(text: str) -> range:
    """N: from 1 to N; A:B: from A to B. A mistake ends the command."""
    first, colon, last = text.partition(":")
    numbers = [first, last] if colon else ["1", first]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers):
        usage(f"--seeds must be a number of seeds or A:B, not {text[:40]!r}")
    seeds = range(int(numbers[0]), int(numbers[1]) + 1)
    if not 1 <= len(seeds) <= MOST_SEEDS:
        usage(f"--seeds must name from 1 to {MOST_SEEDS} seeds, not {text[:40]!r}")
    return seeds


def _print(cases: "list[Case]", over_time: list[dict[str, Any]], form: OutputFormat) -> None:
    """over_time: of each case, for JSON."""
    from rich.console import Console

    from bamboo.terminal.simulation_table import simulation_documents, simulation_table

    if form is OutputFormat.JSON:
        typer.echo(json.dumps(simulation_documents(cases, over_time), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
        console.print(simulation_table(cases, console.width))
