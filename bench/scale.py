"""A measurement of the operator's resource use with many jobs, and of its speed when nodes get notice.

    python bench/scale.py [--nodes 40] [--jobs 4] [--notices 8] [--burst 4] [--repeat 2] [--json FILE]
    python bench/scale.py --jobs 1 --stages 10 --pipelines 100 --nodes 1000 --burst 1 [--json FILE]

The operator and the test cluster's control plane are real; docs/testing-cluster.md lists the requirements. Nodes are
fake, and this process plays the workers of all jobs over real control channels with real tokens. The workers train
nothing; each sends two heartbeats per second, and each job reports a step per second. At rest the operator sends the
API server two kinds of requests: each job's progress, and every 10 s its Lease's renewal.
"""

import asyncio
import random
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from _common import machine, main, median, quantile, say, show, write_json
from _plane import Json
from _scene import Size, scene
from bamboo_core.serving.descriptors import raise_limit

TARGET_NOTICE, TARGET_BURST, TARGET_MIB = 0.25, 2.0, 300.0

PLAIN = (  # name, key in a window, scale
    ("seconds", "seconds", 1.0),
    ("channels that broke", "cuts", 1.0),
    ("stand-ins' loop late by at most, ms", "late", 1e3),
)


def run(
    nodes: Annotated[int, typer.Option(min=8, max=10_000)] = 40,
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Of 8 workers each: 2 pipelines of 4 stages.")] = 4,
    stages: Annotated[int, typer.Option(min=2, max=100)] = 4,
    pipelines: Annotated[int, typer.Option(min=1, max=500, help="Of each job.")] = 2,
    wave: Annotated[int, typer.Option(min=1, help="Jobs that are begun at the same time.")] = 10,
    rest: Annotated[float, typer.Option(help="Seconds in which nothing happens.")] = 30,
    notices: Annotated[int, typer.Option(min=0, help="One after the other, to one job after the other.")] = 8,
    burst: Annotated[int, typer.Option(min=0, help="Jobs of which one node each gets notice at the same time.")] = 4,
    repeat: Annotated[int, typer.Option(min=0, help="Bursts.")] = 2,
    seed: int = 0,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Start the jobs, let them run undisturbed, and give notice to single nodes and to many at once."""
    raise_limit()  # a channel for each worker
    size = Size(nodes=nodes, jobs=jobs, wave=wave, stages=stages, pipelines=pipelines)
    amounts = {"rest": rest, "notices": notices, "burst": min(burst, jobs), "repeat": repeat}
    main(_run(size, amounts, random.Random(seed), json))


async def _run(size: Size, amounts: dict[str, float], rng: random.Random, out: Path | None) -> None:
    figures: Json = {"machine": machine(), **asdict(size), **amounts}
    with tempfile.TemporaryDirectory(prefix="bamboo-bench-") as name:
        async with scene(Path(name), size, rng) as place:
            figures["windows"] = windows = {"start": await place.start()}
            say(f"all jobs run; {amounts['rest']:g} s of rest")
            async with place.window() as windows["rest"]:
                await asyncio.sleep(amounts["rest"])
            async with place.window() as windows["notices"]:
                figures["single"] = [await place.notice(1) for _ in range(int(amounts["notices"]))]
            async with place.window() as windows["bursts"]:
                figures["bursts"] = [await place.notice(int(amounts["burst"])) for _ in range(int(amounts["repeat"]))]
            figures["troubles"] = place.troubles()
    _show(size, figures)
    write_json(out, figures)


def _show(size: Size, figures: Json) -> None:
    title = f"{size.jobs} jobs of {size.workers} workers, {size.nodes} nodes, {figures['machine']['cpus']} cores"
    rows = [_latency("one notice", [n for one in figures["single"] for n in one], TARGET_NOTICE)]
    for index, burst in enumerate(figures["bursts"]):
        rows.append(_latency(f"burst {index + 1} of {len(burst)}", burst, TARGET_BURST))
    show(
        f"{title}: taint's write to last survivor's plan, ms",
        ("", "notices", "median", "p99", "max", "target p99", "first survivor, median", "write, median", "unheard"),
        rows,
    )
    windows = figures["windows"]
    show(f"what it takes; target for memory: {TARGET_MIB:g} MiB", ("", *windows), _taken(windows))
    what = sorted({call for window in windows.values() for call in window["calls"]})
    units = [
        ("a start", "start", size.jobs),
        ("a job and minute of rest", "rest", size.jobs * windows["rest"]["seconds"] / 60),
        ("a single notice", "notices", len(figures["single"])),
        ("a notice in a burst", "bursts", sum(map(len, figures["bursts"]))),
    ]
    rows = [[call, *(_calls(windows, name, call, count) for _, name, count in units)] for call in what]
    show(
        "API calls of the operator; with notices, beyond those of rest; for",
        ("", *(said for said, _, _ in units)),
        rows,
    )
    if ended := [f"{name}: {text}" for name, w in windows.items() for text in w["ended"]]:
        say(f"{len(ended)} workers were told to end though they had no notice, such as {ended[0]}")
    for line in figures["troubles"][:5]:
        say(line)


def _taken(windows: dict[str, Json]) -> list[list[str]]:
    """Return a table of the windows' figures, a row per figure."""
    rows = [[name, *(f"{w[key] * scale:.0f}" for w in windows.values())] for name, key, scale in PLAIN]
    rows.append(["memory (RSS) of the operator, MiB", *(f"{w['memory_mib']:.0f}" for w in windows.values())])
    rows.append(["its highest so far, MiB", *(f"{w['peak_memory_mib']:.0f}" for w in windows.values())])
    for name in windows["start"]["cores"]:
        rows.append([f"cores: {name}", *(f"{w['cores'][name]:.2f}" for w in windows.values())])
    return rows


def _calls(windows: dict[str, Json], name: str, call: str, count: float) -> str:
    if not count:
        return ""
    here, rest = windows[name], windows["rest"]
    usual = rest["calls"].get(call, 0) / rest["seconds"] * here["seconds"] if name in ("notices", "bursts") else 0.0
    return f"{max(0.0, here['calls'].get(call, 0) - usual) / count:.2f}"


def _latency(name: str, notices: list[Json], target: float) -> list[str]:
    last = [1e3 * n["last"] for n in notices if n["last"] is not None]
    first = [1e3 * n["first"] for n in notices if n["first"] is not None]
    written = median([1e3 * n["written"] for n in notices])
    verdict = "met" if last and len(last) == len(notices) and quantile(last, 0.99) <= 1e3 * target else "missed"
    return [
        name,
        str(len(notices)),
        f"{median(last):.0f}",
        f"{quantile(last, 0.99):.0f}",
        f"{max(last, default=0):.0f}",
        f"{1e3 * target:.0f}: {verdict}",
        f"{median(first):.0f}",
        f"{written:.0f}",
        str(len(notices) - len(last)),
    ]


if __name__ == "__main__":
    typer.run(run)
