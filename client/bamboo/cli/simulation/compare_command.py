"""`bamboo compare`: its flags and what it says in --help. What takes time to import is imported late."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import refuse_beside, usage
from bamboo.cli.simulation.case_options import (
    MarketOptions,
    NodeOptions,
    OutputOptions,
    check_market,
    print_cases,
    rates_of,
    seeds_of,
)
from bamboo_core.option_groups import grouped

app = typer.Typer(rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of a comparison as the user gave them."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="on-demand, checkpoint, checkpoint-blocking, torchrun-elastic, torchrun-fixed, morphing, templates,"
            " rerouting, memory-checkpoints, quorum or bamboo. May be given several times.",
            show_default="all",
        ),
    ] = None
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="Without a job: gpt-2, bert, resnet, gnmt, vgg or alexnet.")
    ] = "bert"
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="What `bamboo profile` wrote, a profile of Bamboo's, or @NAME of a GPU (docs/simulator.md).",
            show_default="the workload's on V100",
        ),
    ] = None
    seeds: Annotated[
        str, typer.Option(metavar="N|A:B", help="Number of seeds, from 1 on; or the seeds from A to B.")
    ] = "5"


@app.command()
@grouped
def compare(
    ctx: typer.Context,
    job: Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="A BambooJob manifest.")] = None,
    *,
    nodes: NodeOptions,
    market: MarketOptions,
    options: CompareOptions,
    shown: OutputOptions,
) -> None:
    """Compare Bamboo with models of other systems' policies, on the same nodes.

    Example: bamboo compare --workload bert --preempt-rate 0.1 --preempt-rate 0.33

    Example: bamboo compare job.yaml --profile profile.json --strategy bamboo --strategy checkpoint --trace nodes.csv
    """
    rates = rates_of(ctx, nodes, ("replace_rate",))
    if job is not None:
        refuse_beside(ctx, ("workload",), "JOB.yaml")
        if options.profile is None:
            usage(f"--profile: expected what `bamboo profile {job}` writes")
    check_market(market)

    from bamboo.cli.simulation.compare_strategies import Comparison, cases_of, runs
    from bamboo.terminal.run_progress import RunProgress

    wanted = Comparison(
        job=job,
        strategies=tuple(options.strategy or ()),
        workload=options.workload,
        profile=options.profile,
        traces=tuple(nodes.trace or ()),
        rates=rates,
        seeds=seeds_of(options.seeds),
        hours=market.hours,
        replace_rate=market.replace_rate,
        zone_price=market.zone_traffic_price,
    )
    with RunProgress(runs(wanted), shown=not shown.quiet) as progress:
        cases = cases_of(wanted, progress.done)
    print_cases(cases, shown.output)
