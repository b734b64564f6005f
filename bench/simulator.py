"""How long does a run of the research model take, and what do many runs come to?

    python bench/simulator.py [--seeds 1000] [--rates 0.01,0.05,0.1,0.25,0.5] [--json FILE]

BERT to the end of its published run, one process, processor time. The published simulator takes 0.12 to 0.15 s a run.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from _common import machine, say, show, write_json
from bamboo.simulation.figures import spread
from bamboo.simulation.pool import ResearchRun, simulate_run
from bamboo.simulation.research.cost_model import ResearchOptions
from bamboo.simulation.research.research_workloads import workload_of

PUBLISHED_SECONDS = 0.12


def run(
    seeds: Annotated[int, typer.Option(min=1)] = 1000,
    rates: Annotated[str, typer.Option(help="Probabilities within an hour, with commas.")] = "0.01,0.05,0.1,0.25,0.5",
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Simulate, print throughput, value and the time that it took."""
    bert = workload_of("bert")
    options = ResearchOptions(steps=bert.steps)
    rows, figures = [], []
    for rate in (float(text) for text in rates.split(",")):
        say(f"rate {rate:g}: {seeds} seeds")
        runs = [
            ResearchRun(workload=bert, seed=seed, rate=rate, start_hour=0, options=options)
            for seed in range(1, seeds + 1)
        ]
        began = time.process_time()
        found = spread([simulate_run(one) for one in runs])
        seconds = (time.process_time() - began) / seeds
        mean = found.mean
        rows.append([f"{rate:g}", f"{mean['throughput']:.2f}", f"{mean['value']:.3f}", f"{seconds * 1e3:.2f}"])
        figures.append({"rate": rate, "seconds": seconds, **asdict(found)})
    each = sum(one["seconds"] for one in figures) / len(figures)
    title = f"{each * 1e3:.2f} ms a run: {PUBLISHED_SECONDS / each:.0f} times faster"
    show(title, ["rate", "samples/s", "value", "ms"], rows)
    write_json(json, {"machine": machine(), "seeds": seeds, "rates": figures})


if __name__ == "__main__":
    typer.run(run)
