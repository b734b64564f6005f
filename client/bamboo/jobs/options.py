"""Options of plans and simulations. Every command imports this module, so it imports nothing slow."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bamboo.terminal.time_flag import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRunOptions:
    """The options that are the same for `bamboo plan` and `bamboo simulate`."""

    replace_rate: Annotated[
        float,
        typer.Option(metavar="P", help="Probability that a node that was taken away is replaced within an hour."),
    ] = 0.5
    notice: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Notice before made-up preemptions.", show_default="none"),
    ] = None
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps of the job.", show_default="the job's, if known")
    ] = None
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes.", show_default="as many as processors")
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(SimulatedRunOptions):
    """The user's options of a simulation: flags of `bamboo simulate` that are also arguments of `Job.simulate`."""

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
    zone_traffic_price: Annotated[
        float,
        typer.Option(metavar="USD", help="Price of a GB that crosses zones, each way; 0 if the cloud bills none."),
    ] = 0.01
    seeds: Annotated[
        str, typer.Option(metavar="N|A:B", help="Number of seeds, from 1 on; or the seeds from A to B.")
    ] = "10"
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="What `bamboo profile` wrote, a profile of Bamboo's, or @NAME of a GPU (docs/simulator.md).",
        ),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SimulatedRunOptions):
    """The user's options of a plan: flags of `bamboo plan` that are also arguments of `Job.plan`."""

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
