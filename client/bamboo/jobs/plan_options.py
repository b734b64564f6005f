"""Options of a plan. The command line imports this for its flags, so it imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bamboo.jobs.simulate_options import SimulatedRunOptions
from bamboo.terminal.time_flag import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SimulatedRunOptions):
    """The user's options of a plan: the flags of `bamboo plan`, and the arguments of `Job.plan`."""

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
    hours: Annotated[
        float, typer.Option(metavar="H", help="Cut simulations after this time; the rest is taken in proportion.")
    ] = 24.0
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Runs of each simulated plan, which differ.")
    ] = 3
