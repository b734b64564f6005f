"""Does it pay to ask node pools by price and recorded losses, and not as they are listed (`poolOrder: Value`)?

    python bench/pools.py --traces FOLDER
    python bench/pools.py --traces FOLDER --hours 24 --mode None --json pools.json

Recordings of spot nodes in several zones of a region: of Google Cloud's H100 in us-central1, which cost the same and
are lost at different rates, and of AWS' V100 in us-east-2, whose prices move. Each zone is a pool. BERT-Large trains in
virtual time with the real coordinator and the operator's own order of pools: with each order in which the pools can be
listed, and with `poolOrder: Value`, which has to learn what is lost where; and once with one pool for all zones.
Without traffic between zones, whose price is of another decision. Shown are samples for a dollar, samples a second, and
lost workers an hour.
"""

from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import say, show, write_json
from bamboo.profiles.files import read_profile
from bamboo.simulation.job.job_record import JobFigures
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.files import read_trace
from bamboo.traces.window import window
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.traces.trace import Trace, make_trace
from strategies.comparison import published_job

ZONE = "topology.kubernetes.io/zone"
GPUS = 8  # of one of the priced machines of Google Cloud
FREE = 0.0  # USD for a GB between zones
STAGES = 4
ONE_POOL = "one pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Recorded zones, and what trains there."""

    name: str
    profile: str
    zones: tuple[str, ...]
    trace: Trace


def google(folder: Path) -> Region:
    zones = ("us-central1-a", "us-central1-b", "us-central1-c")
    nodes = read_trace(str(folder / "gcp-h100-launched-of-16.csv"))
    prices = read_trace(str(folder / "gcp-h100-prices.csv")).prices
    of_one = [replace(price, usd_per_hour=price.usd_per_hour / GPUS, on_demand=None) for price in prices]
    changes = [change for change in nodes.changes if change.zone in zones]
    trace = make_trace(changes, of_one, duration=nodes.duration)
    return Region(name="H100, us-central1", profile="bert@h100", zones=zones, trace=trace)


def amazon(folder: Path) -> Region:
    files = {
        "us-east-2a": "aws-v100-4node-us-east-2a-counts.csv",
        "us-east-2b": "aws-v100-16node-us-east-2b-launchable.csv",
    }
    parts = [read_trace(str(folder / file), zone) for zone, file in files.items()]
    prices = read_trace(str(folder / "aws-v100-spot-price-changes.csv")).prices
    seconds = min(part.duration for part in parts)
    changes = [
        replace(change, node=f"{change.zone}-{change.node}")
        for part in parts
        for change in part.changes
        if change.at <= seconds
    ]
    trace = make_trace(changes, [price for price in prices if price.at <= seconds], duration=seconds)
    return Region(name="V100, us-east-2", profile="bert-v100", zones=tuple(files), trace=trace)


def simulated(region: Region, order: tuple[str, ...], by: str, workers: int, mode: str, trace: Trace) -> JobFigures:
    """The figures of a run that lists the pools of these zones in that order; without any, of one with a single pool,
    whose nodes come in whatever zone they are recorded in.
    """
    profile = read_profile(region.profile)
    known = published_job(read_profile("bert-v100"))
    zones = [{"name": zone, "template": {"spec": {"nodeSelector": {ZONE: zone}}}} for zone in order]
    pools = zones or [{"name": "spot"}]
    topology = {"stages": STAGES, "pipelines": workers // STAGES}
    elastic = {"minPipelines": 1}
    spec = {**known.document["spec"], "elastic": elastic, "topology": topology, "nodePools": pools, "poolOrder": by}
    spec["redundancy"] = {**spec["redundancy"], "mode": mode}
    document: dict[str, Any] = {**known.document, "spec": spec}
    run = JobRun(spec=parse_manifest(document), manifest=document, profile=profile, trace=trace, zone_price=FREE)
    return simulate_job(run).figures


def run(
    traces: Annotated[Path, typer.Option(help="A folder with the recordings.")],
    hours: Annotated[float, typer.Option(help="Of each run.")] = 96.0,
    start: Annotated[float, typer.Option(help="Hours of the recordings that are left out at their beginning.")] = 24.0,
    workers: Annotated[int, typer.Option(help="At most.")] = 12,
    mode: Annotated[str, typer.Option(help="spec.redundancy.mode.")] = "LazyForward",
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Simulate each order, and print a table."""
    rows: list[dict[str, Any]] = []
    for region in (google(traces), amazon(traces)):
        trace = window(region.trace, start * 3600, hours * 3600)
        for order in ((), *permutations(region.zones)):
            say(f"{region.name}: {', '.join(order) or ONE_POOL}")
            row: dict[str, Any] = {"region": region.name, "order": order}
            for by in ("Listed", "Value"):
                found = simulated(region, order, by, workers, mode, trace)
                row[by] = {
                    "samples_per_usd": found.throughput * 3600 / found.usd_per_hour,
                    "throughput": found.throughput,
                    "losses_per_hour": found.preemptions / found.hours,
                    "nodes": found.nodes,
                }
            rows.append(row)
    lines = [
        [
            row["region"],
            ", ".join(zone[-2:] for zone in row["order"]) or ONE_POOL,
            *(
                f"{row['Listed'][name]:.{digits}f} / {row['Value'][name]:.{digits}f}"
                for name, digits in (("samples_per_usd", 0), ("throughput", 1), ("losses_per_hour", 2), ("nodes", 1))
            ),
        ]
        for row in rows
    ]
    columns = ["region", "listed", "samples / USD", "samples / s", "losses / h", "nodes"]
    show("As listed / by value", columns, lines)
    write_json(json, {"hours": hours, "workers": workers, "mode": mode, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
