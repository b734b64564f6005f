"""Options of a simulation. The command line imports this for its flags, so it imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRunOptions:
    """The options that `bamboo plan` and `bamboo simulate` share."""

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
    """The user's options of a simulation: the flags of `bamboo simulate`, and the arguments of `Job.simulate`."""

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
