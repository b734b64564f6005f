"""`bamboo plan`: its flags and what it says in --help. What takes time to import is imported late."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo.cli.dispatch import refuse_beside, usage
from bamboo.cli.options import LONGEST_SECONDS, seconds
from bamboo.cli.simulation.job_file import job_of
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED, EXIT_OK
from bamboo_core.option_groups import grouped

if TYPE_CHECKING:
    from bamboo.jobs.planning import PlanRequest

app = typer.Typer(rich_markup_mode=None)
MOST_LISTED = 64
NOT_BESIDE_TRACE = ("preempt_rate", "replace_rate", "pattern", "zones", "notice")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The command's flags as the user gave them."""

    prices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What machines and traffic cost (docs/planning.md); or the name of a list of Bamboo's.",
            show_default="the profile's prices",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Only machines with these GPUs, from a100 to v100; what the job's own layers take there is computed.",
            show_default="all of --prices",
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="As of `bamboo simulate`, for machines of --prices without one of their own.",
        ),
    ] = None
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A recording of nodes (docs/traces.md); several become one."),
    ] = None
    preempt_rate: Annotated[
        float | None,
        typer.Option(metavar="P", help="Instead made-up nodes: probability that one is taken away within an hour."),
    ] = None
    replace_rate: Annotated[
        float, typer.Option(metavar="P", help="Probability that such a node is replaced within an hour.")
    ] = 0.5
    pattern: Annotated[
        str,
        typer.Option(metavar="NAME", help="How made-up nodes are taken away: hourly or zones (many at once)."),
    ] = "hourly"
    zones: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Zones of made-up nodes, with commas.",
            show_default="those that the job names, else a,b,c",
        ),
    ] = None
    notice: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Notice before made-up preemptions.", show_default="none"),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(metavar="USD", help="The fastest that costs no more for the whole job, with a margin."),
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="TIME", help="The cheapest that ends within this time, with a margin."),
    ] = None
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=4096,
            help="Nodes at most.",
            show_default="the most of the trace, or twice as many as the job asks for",
        ),
    ] = None
    stages: Annotated[
        str | None, typer.Option(metavar="N,N", help="Only these numbers of stages.", show_default="all")
    ] = None
    pipelines: Annotated[
        str | None, typer.Option(metavar="N,N", help="Only these numbers of pipelines.", show_default="all")
    ] = None
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Only these microbatches, in samples.",
            show_default="half, once and twice the job's and the profile's",
        ),
    ] = None
    standby: Annotated[
        str | None, typer.Option(metavar="N,N", help="Only these numbers of standbys.", show_default="a few")
    ] = None
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps of the job.", show_default="the job's, if known")
    ] = None
    hours: Annotated[
        float, typer.Option(metavar="H", help="Cut simulations after this time; the rest is taken in proportion.")
    ] = 24.0
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Runs of each plan of the last round, which differ.")
    ] = 5
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes.", show_default="as many as processors")
    ] = None
    output: Output = OutputFormat.TEXT
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False


@app.command()
@grouped
def plan(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    *,
    options: PlanOptions,
) -> None:
    """Find out which machines, grid and protection a job should have, and what it will cost, before paying.

    Prints the Pareto-optimal plans, the recommended one with what to change in the manifest, and why.

    Example: bamboo plan job.yaml --device a100,h100 --preempt-rate 0.1
    Example: bamboo plan job.yaml --prices prices.yaml --preempt-rate 0.1 --budget 500
    """
    from bamboo.jobs.planning import PlanRequest

    _check(ctx, options)
    wanted = PlanRequest(
        job=job_of(job),
        prices=options.prices,
        devices=_names(options.device),
        profile=options.profile,
        traces=tuple(options.trace or ()),
        rate=options.preempt_rate,
        replace_rate=options.replace_rate,
        pattern=options.pattern,
        zones=() if options.zones is None else tuple(zone.strip() for zone in options.zones.split(",")),
        notice=options.notice,
        budget=options.budget,
        deadline=None if options.deadline is None else options.deadline / 3600,
        nodes=options.nodes,
        stages=_numbers(options.stages, "--stages"),
        pipelines=_numbers(options.pipelines, "--pipelines"),
        micro_batches=_numbers(options.micro_batch, "--micro-batch"),
        standby=_numbers(options.standby, "--standby", least=0),
        steps=options.steps,
        hours=options.hours,
        seeds=options.seeds,
        jobs=options.jobs or os.cpu_count() or 1,
        shown=not options.quiet,
    )
    raise typer.Exit(_plan(wanted, options))


def _plan(wanted: "PlanRequest", options: PlanOptions) -> int:
    """The exit code: of a failure if no option keeps the bounds. A mistake ends the command."""
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.planning import planned
    from bamboo.terminal.plan_table import document, plan_text

    try:
        found = planned(wanted)
    except InvalidRequest as error:
        usage(str(error))
    for warning in found.warnings:
        complain(warning)
    report = found.report
    if options.output is OutputFormat.JSON:
        print(document(report))
    else:
        print(plan_text(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if report.found.chosen is None:
        complain(" ".join(report.told))
        return EXIT_FAILED
    return EXIT_OK


def _check(ctx: typer.Context, options: PlanOptions) -> None:
    """What the flags themselves say wrong."""
    if options.trace:
        refuse_beside(ctx, NOT_BESIDE_TRACE, "--trace")
    if not options.trace and options.preempt_rate is None:
        usage("--preempt-rate or --trace: expected one of them")
    for name, value in (("--preempt-rate", options.preempt_rate), ("--replace-rate", options.replace_rate)):
        if value is not None and not 0 <= value <= 1:
            usage(f"{name} {value:g}: expected a probability from 0 to 1")
    for name, amount, most in (
        ("--budget", options.budget, 1e9),
        ("--deadline", options.deadline, LONGEST_SECONDS),
        ("--hours", options.hours, 87_600.0),
        ("--notice", options.notice, 86_400.0),
    ):
        if amount is not None and not 0 < amount <= most:
            usage(f"{name} {amount:g}: expected a number above 0 and at most {most:.0f}")
    if options.profile is not None and options.device is not None:
        usage("--device: not with --profile, which says on what device the job runs; @NAME is a profile, too")
    if options.profile is None and options.prices is None and options.device is None:
        from bamboo.profiles.files import read_devices, shipped_names

        usage(
            f"--device: expected some of {', '.join(read_devices().devices)}; or --profile with a file that `bamboo"
            f" profile` writes, or one of {', '.join(shipped_names())}; or --prices with machines that have one"
        )


def _names(text: str | None) -> tuple[str, ...]:
    """a100,h100. A mistake ends the command."""
    names = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    if not all(names) or len(names) > MOST_LISTED:
        usage(f"--device {(text or '')[:40]!r}: expected at most {MOST_LISTED} names of devices, with commas")
    return tuple(dict.fromkeys(names))


def _numbers(text: str | None, name: str, least: int = 1) -> tuple[int, ...]:
    """4,8,12. A mistake ends the command."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    known = all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts)
    if not known or len(parts) > MOST_LISTED:
        usage(f"{name} {text[:40]!r}: expected at most {MOST_LISTED} whole numbers from {least} on, with commas")
    return tuple(sorted({int(part) for part in parts}))
