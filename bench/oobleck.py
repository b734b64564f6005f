"""Oobleck's experiment (SOSP 2023) with Bamboo's real coordinator in virtual time, beside Oobleck's own figures.

    python bench/oobleck.py --data FOLDER [--models GPT-3-2_7b] [--cases 10m,5m] [--memory 48]
                            [--json cells.json] [--plot oobleck.png]
    python bench/oobleck.py --merge cells-1.json,cells-2.json [--json all.json] [--plot oobleck.png]

FOLDER holds the inputs of the artifact's simulator: throughput.csv (each system's measurements on 15 to 30 nodes) and a
table of nodes for each case. docs/benchmarks.md lists the assumptions. It prints one table, with the artifact's figures
of the other systems; --merge prints it from the cells of earlier runs.
"""

import csv
import json as json_format
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from _common import chosen_of, say, write_json
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.files import read_trace
from bamboo.traces.trace import Change, Trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import (
    SOURCES,
    Layer,
    Machine,
    ModelProfile,
    Network,
    Source,
    Storage,
    Times,
)
from bamboo_core.planning.steps.grid_rates import GridRates

CASES: Final = ("6h", "3h", "1h", "30m", "10m", "5m", "p3-scaled", "gcp-scaled")
NODES: Final = 30
GIB: Final = 2**30
USABLE: Final = 0.9  # of a card; the rest is left to torch
FP32: Final = 4  # bytes of a number
FLOW: Final = 3e9  # bytes per second of a connection: 24 Gb/s
DETECTION: Final = 0.1  # seconds until a loss is known
STEPS: Final = 10_000_000
UPDATE_BYTES: Final = 600e9  # bytes per second of the device's memory, which bounds an update of AdamW
SCALINGS: Final = 4  # approximations to the measured speed
Cell = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of equal blocks. batch: samples per step. samples: samples per microbatch."""

    batch: int
    samples: int
    blocks: int
    width: int
    context: int
    vocabulary: int

    def profile(self, memory: float, scale: float) -> ModelProfile:
        """Return a profile for fp32, AdamW and activation checkpointing of each block. memory: usable bytes of a card.
        scale: seconds per floating-point operation.
        """
        tokens = self.samples * self.context
        boundary = tokens * self.width * FP32
        block = 12 * self.width**2 + 13 * self.width
        operations = 2 * tokens * block + 4 * tokens * self.context * self.width
        ends = self.vocabulary * self.width

        def layer(numbers: int, forward: float, again: int) -> Layer:
            """Return a layer of `numbers` parameters. forward: operations; the backward repeats it `again` times."""
            return Layer(
                forward=forward * scale,
                backward=(2 + again) * forward * scale,
                update=7 * numbers * FP32 / UPDATE_BYTES,
                parameters=numbers * FP32,
                optimizer=2 * numbers * FP32,
                gradients=numbers * FP32,
                boundary=boundary,
                cost=(3 + again) * forward,
            )

        blocks = (layer(block, operations, 1),) * self.blocks
        return ModelProfile(
            name="oobleck",
            device=f"{memory / GIB:g} GiB",
            samples=self.samples,
            layers=(layer(ends, 0.0, 0), *blocks, layer(ends, 2 * tokens * ends, 0)),
            network=Network(flow=FLOW, machine=FLOW, latency=1e-4),
            storage=Storage(write=FLOW, read=FLOW, latency=0.01),
            times=Times(start=0.0, detection=DETECTION),
            machine=Machine(memory=int(memory), host_memory=int(4 * memory)),
            sources={name: Source(text="assumed", estimated=True) for name in SOURCES},
        )


MODELS: Final = {
    "BERT-large": Shape(batch=8192, samples=32, blocks=24, width=1024, context=512, vocabulary=30522),
    "GPT-2-ours": Shape(batch=1024, samples=8, blocks=24, width=1024, context=1024, vocabulary=50257),
    "GPT-3-medium": Shape(batch=820, samples=4, blocks=24, width=2048, context=2048, vocabulary=50257),
    "GPT-3-2_7b": Shape(batch=512, samples=4, blocks=32, width=2560, context=2048, vocabulary=50257),
    "GPT-3-6_7b": Shape(batch=1024, samples=4, blocks=32, width=4096, context=2048, vocabulary=50257),
}


@dataclass(frozen=True, slots=True)
class Published:
    """Samples per second from the artifact's simulator. bamboo: Bamboo of 2023; None if the model does not fit."""

    bamboo: float | None
    varuna: float
    oobleck: float


PUBLISHED: Final = {
    ("BERT-large", "10m"): Published(70, 174, 282),
    ("BERT-large", "5m"): Published(60, 77, 275),
    ("BERT-large", "p3-scaled"): Published(64, 127, 221),
    ("BERT-large", "gcp-scaled"): Published(68, 164, 244),
    ("GPT-2-ours", "10m"): Published(16, 76, 84.8),
    ("GPT-2-ours", "p3-scaled"): Published(14, 51, 67),
    ("GPT-2-ours", "gcp-scaled"): Published(15, 65, 73),
    ("GPT-3-medium", "10m"): Published(None, 20, 28.7),
    ("GPT-3-medium", "p3-scaled"): Published(None, 15.4, 22.5),
    ("GPT-3-medium", "gcp-scaled"): Published(None, 19.4, 24.6),
    ("GPT-3-2_7b", "1h"): Published(None, 6.5, 7.23),
    ("GPT-3-2_7b", "10m"): Published(None, 1.8, 6.89),
    ("GPT-3-2_7b", "5m"): Published(None, 0.0, 6.50),
    ("GPT-3-2_7b", "p3-scaled"): Published(None, 0.6, 5.42),
    ("GPT-3-2_7b", "gcp-scaled"): Published(None, 0.9, 6.13),
    ("GPT-3-6_7b", "1h"): Published(None, 2.7, 4.22),
    ("GPT-3-6_7b", "10m"): Published(None, 0.3, 3.55),
    ("GPT-3-6_7b", "p3-scaled"): Published(None, 0.0, 2.68),
    ("GPT-3-6_7b", "gcp-scaled"): Published(None, 0.0, 2.92),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Oobleck's measurements of a model: samples per second by number of nodes, and a change's pause in seconds."""

    rates: dict[int, float]
    pause: float

    def rate(self, nodes: int) -> float:
        return self.rates.get(min(nodes, max(self.rates)), 0.0)


def read_measured(path: Path, model: str) -> Measured:
    """Read Oobleck's measurements of a model. Raises ValueError if the table has no line for the model."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["system"]) == (model, "oobleck")]
    if not rows:
        raise ValueError(f"{path}: expected lines of model {model} and system oobleck")
    rates = {int(row["nodes"]): float(row["samples_per_s"] or 0) for row in rows}
    return Measured(rates, float(rows[0]["reconfigure_ms"]) / 1000)


def replayed(measured: Measured, batch: int, trace: Trace, *, joins_at_once: bool) -> float:
    """Return Oobleck's samples per second at its measured rates, with a pause at each change of the training nodes.

    A loss discards the step in progress; a joining node costs no part of a step. joins_at_once: nodes join when they
    come (the fair replay); otherwise at the next loss, as in the artifact, or at once if nothing trains.
    """
    present = active = 0
    since = samples = 0.0
    for at, changes in groupby(trace.changes, key=lambda change: change.at):
        now = [change.change for change in changes]
        present += now.count(Change.ADD) - now.count(Change.REMOVE)
        lost = Change.REMOVE in now
        stopped = not measured.rate(active)
        if present == active or not (joins_at_once or lost or stopped):
            continue
        trained = max(0.0, at - since) * measured.rate(active)
        samples += trained // batch * batch if lost else trained
        since = at if stopped else max(since, at + measured.pause)
        active = present
    samples += max(0.0, trace.duration - since) * measured.rate(active)
    return samples / trace.duration


def manifest(shape: Shape) -> dict[str, Any]:
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "oobleck"},
        "spec": {
            "task": {"entrypoint": "oobleck:build"},
            "training": {
                "steps": STEPS,
                "globalBatchSize": shape.batch,
                "microBatchSize": shape.samples,
            },
            "topology": {"schedule": "1F1B"},
            "elastic": {"maxWorkers": NODES},
            "redundancy": {"mode": "Replicas"},
            "checkpoint": {"storage": "s3://oobleck/checkpoints"},
        },
    }


def scaled(shape: Shape, memory: float, speed: float) -> ModelProfile:
    """Return the profile whose fastest grid of all nodes trains about `speed` samples per second. Raises ValueError if
    no grid fits into memory.
    """
    spec, scale = parse_manifest(manifest(shape)), 1e-13
    for _ in range(SCALINGS):
        profile = shape.profile(memory, scale)
        found = GridRates(profile.figures, spec, profile.machine.memory).best(NODES)
        if found is None:
            raise ValueError(f"--memory: no grid of {NODES} nodes fits a card with {memory / GIB:.1f} GiB to use")
        scale *= shape.batch / speed / found.seconds
    return shape.profile(memory, scale)


def run_cell(name: str, shape: Shape, case: str, measured: Measured, trace: Trace, memory: float) -> Cell:
    """Simulate one model on the nodes of one case, and return the figures."""
    began = time.monotonic()
    profile = scaled(shape, memory, measured.rate(NODES))
    document = manifest(shape)
    result = simulate_job(JobRun(spec=parse_manifest(document), manifest=document, profile=profile, trace=trace))
    trained = result.figures.steps * shape.batch
    return {
        "model": name,
        "case": case,
        "ours": trained / trace.duration,
        "outcome": result.outcome,
        "message": result.message,
        "fair": replayed(measured, shape.batch, trace, joins_at_once=True),
        "joins_at_losses": replayed(measured, shape.batch, trace, joins_at_once=False),
        "takeovers": result.figures.takeovers,
        "restores": result.figures.restores,
        "hours": result.figures.hours,
        "seconds": round(time.monotonic() - began, 1),
    }


def run(
    data: Annotated[Path | None, typer.Option(help="The folder with throughput.csv and the tables of nodes.")] = None,
    models: Annotated[str | None, typer.Option(help="Only these models, with commas.")] = None,
    cases: Annotated[str | None, typer.Option(help="Only these cases, with commas.")] = None,
    memory: Annotated[float, typer.Option(min=1, help="GiB of a card.")] = 48.0,
    merge: Annotated[str | None, typer.Option(help="Files with cells, with commas; nothing is run.")] = None,
    json: Annotated[Path | None, typer.Option(help='Write the cells to this file, or to "-".')] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
) -> None:
    """Simulate Bamboo on Oobleck's cases, and print its samples per second beside Oobleck's."""
    if merge is not None:
        cells = [cell for path in merge.split(",") for cell in json_format.loads(Path(path).read_text())["cells"]]
        write_json(json, {"cells": cells})
    elif data is not None:
        chosen = [
            (model, case)
            for model in chosen_of(models.split(",") if models else None, tuple(MODELS), "--models")
            for case in chosen_of(cases.split(",") if cases else None, CASES, "--cases")
        ]
        cells = []
        for number, (model, case) in enumerate(chosen, start=1):
            say(f"{number} of {len(chosen)}: {model}, {case}")
            measured, trace = read_measured(data / "throughput.csv", model), read_trace(str(data / f"{case}.csv"))
            cells.append(run_cell(model, MODELS[model], case, measured, trace, USABLE * memory * GIB))
            say(f"{cells[-1]['ours']:.2f} samples/s, {cells[-1]['outcome']}, after {cells[-1]['seconds']} s")
            write_json(json, {"cells": cells})
    else:
        raise typer.BadParameter("expected a folder, or files after --merge", param_hint="--data")
    _show(cells)
    if plot is not None:
        _plot(cells, plot)


def _show(cells: Sequence[Cell]) -> None:
    print("| Model | A loss every | Bamboo of 2023 | Varuna | Oobleck, artifact | Oobleck, fair | Bamboo | over fair |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for cell in cells:
        known = PUBLISHED.get((cell["model"], cell["case"]))
        bamboo = "–" if known is None else "no room" if known.bamboo is None else f"{known.bamboo:g}"
        others = f"{known.varuna:g} | {known.oobleck:g}" if known else "– | –"
        ours = f"{cell['ours']:.2f}" + ("" if cell["outcome"] == "cut" else f" ({cell['outcome']})")
        over = f"{cell['ours'] / cell['fair']:.3f}" if cell["fair"] else "–"
        print(f"| {cell['model']} | {cell['case']} | {bamboo} | {others} | {cell['fair']:.2f} | {ours} | {over} |")


def _plot(cells: Sequence[Cell], path: Path) -> None:
    """Plot Bamboo's samples per second divided by Oobleck's in the fair replay, a panel per model. Above the line
    Bamboo is faster.
    """
    from matplotlib.figure import Figure

    from bamboo.simulation.plots import COLOURS, GROUND, INK, SOFT

    names = list(dict.fromkeys(cell["model"] for cell in cells))
    figure = Figure(figsize=(2.6 * len(names) + 1, 3.2), facecolor=GROUND, layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        mine = [cell for cell in cells if cell["model"] == name]
        heights = [cell["ours"] / cell["fair"] if cell["fair"] else 0.0 for cell in mine]
        axes.bar([cell["case"] for cell in mine], heights, color=COLOURS[0])
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_title(f"{name}: over Oobleck", fontsize=9, color=INK, loc="left")
        axes.tick_params(colors=SOFT, labelsize=7, axis="both", rotation=45)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=85)


if __name__ == "__main__":
    typer.run(run)
