"""`bamboo simulate`: its flags and what it says in --help. What takes time to import is imported late."""

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.output_files import check_plot
from bamboo.cli.simulation.case_options import (
    MarketOptions,
    NodeOptions,
    OutputOptions,
    check_market,
    print_cases,
    rates_of,
    seeds_of,
)
from bamboo.cli.simulation.job_file import job_of
from bamboo_core.job.text_patterns import DATE_TIME
from bamboo_core.option_groups import grouped

app = typer.Typer(rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The command's flags as the user gave them."""

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
    begin: Annotated[
        str | None,
        typer.Option(
            metavar="DATE",
            help="With spec.budget.doneBy: date and time at which runs begin, such as 2026-12-24T18:00:00Z.",
            show_default="now",
        ),
    ] = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the runs over time, as PNG.")] = None
    events: Annotated[bool, typer.Option("--events", help="Print what happens on standard error; for one run.")] = False
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes.", show_default="as many as processors")
    ] = None


@app.command()
@grouped
def simulate(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    *,
    nodes: NodeOptions,
    market: MarketOptions,
    options: SimulateOptions,
    shown: OutputOptions,
) -> None:
    """Train a job in virtual time under preemptions.

    The job's own coordinator decides; a profile says how long everything takes.

    Example: bamboo simulate job.yaml --profile profile.json --preempt-rate 0.1 --preempt-rate 0.5 --plot runs.png
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.simulating import JobSimulation, budget_sentences, simulated
    from bamboo.simulation.figures import SimulationError, spread
    from bamboo.terminal.simulation_table import over_time_document

    if options.profile is None:
        from bamboo.profiles.files import shipped_names

        known = ", ".join(shipped_names())
        usage(f"--profile: expected a file that `bamboo profile {job}` writes, or one of {known}")
    rates = rates_of(ctx, nodes, ("replace_rate", "notice", "zones"))
    check_market(market)
    _check_numbers(options)
    check_plot("--plot", options.plot)
    wanted = JobSimulation(
        job=job_of(job),
        profile=options.profile,
        traces=tuple(nodes.trace or ()),
        rates=rates,
        seeds=seeds_of(options.seeds),
        hours=market.hours,
        steps=options.steps,
        replace_rate=market.replace_rate,
        notice=options.notice,
        zones=() if options.zones is None else tuple(zone.strip() for zone in options.zones.split(",")),
        price=options.price,
        zone_price=market.zone_traffic_price,
        jobs=options.jobs,
        begin=_begin(options.begin),
        say=(lambda line: print(line, file=sys.stderr)) if options.events else None,
        shown=not shown.quiet,
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
    print_cases(cases, shown.output, over_time)
    for one in found.cases:
        for text in sorted({run.message for run in one.runs if run.outcome not in ("cut", "Complete")}):
            ended = sum(run.message == text for run in one.runs)
            print(f"{one.name}: {ended} of {len(one.runs)} ended: {text}", file=sys.stderr)
        for text in budget_sentences(found.spec, wanted.begin, one.runs):
            print(f"{one.name}: {text}", file=sys.stderr)


def _begin(text: str | None) -> datetime:
    """Now, if nothing is said."""
    if text is None:
        return datetime.now(UTC)
    if not DATE_TIME.fits(text):
        usage(f"--begin {text[:40]!r}: expected {DATE_TIME.said}")
    return datetime.fromisoformat(text)


def _check_numbers(options: SimulateOptions) -> None:
    if options.notice is not None and not 0 <= options.notice <= 86_400:
        usage(f"--notice {options.notice:g}: expected seconds from 0 to 86400")
    if options.price is not None and not 0 <= options.price <= 1e6:
        usage(f"--price {options.price:g}: expected USD from 0 to 1000000")
