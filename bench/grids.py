"""How near the coordinator comes to the fastest grid of each moment of a recording of nodes, in virtual time.

    python bench/grids.py FOLDER/p3-trace.csv [more recordings] [--models bert,gpt-2] [--hours 24]

Each model is trained with its published batch by a job that says nothing but `elastic.objective: Throughput`, with
copies of each stage on its neighbour and checkpoints, by the real coordinator (`bamboo simulate`). The bound has the
fastest grid of all that fit into memory running at every moment, without a pause, by the same model of a step.
"""

import argparse
import logging
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bamboo.job.manifest import parse_manifest
from bamboo.planning.steps.grid_rates import GridRates
from bamboo.profiles.files import read_profile, shipped_names
from bamboo.profiles.profile import ModelProfile, for_microbatch
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.files import read_trace
from bamboo.traces.trace import Change, Trace

HOUR = 3600.0
MODELS = tuple(name.removesuffix("-v100") for name in shipped_names())


def manifest(profile: ModelProfile, nodes: int) -> dict[str, Any]:
    assert profile.published is not None
    stages = min(len(profile.layers), profile.published.stages)
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "bench"},
        "spec": {
            "task": {"entrypoint": "bench:build"},
            "training": {
                "steps": 10_000_000,
                "globalBatchSize": profile.published.batch,
                "microBatchSize": profile.samples,
            },
            "topology": {"stages": stages, "pipelines": 1},
            "elastic": {"objective": "Throughput", "maxStages": len(profile.layers), "maxWorkers": max(nodes, stages)},
            "checkpoint": {"storage": {"uri": "s3://bench/job"}},
        },
    }


def most_nodes(trace: Trace) -> int:
    there = most = 0
    for change in trace.changes:
        there += 1 if change.change is Change.ADD else -1
        most = max(most, there)
    return most


def bound(rates: GridRates, trace: Trace, seconds: float, start: float) -> float:
    """Steps. start: seconds until a new node's worker is ready."""
    there, since, steps = 0, 0.0, 0.0
    moments = sorted(
        (change.at + (start if change.change is Change.ADD else 0.0), 1 if change.change is Change.ADD else -1)
        for change in trace.changes
    )
    for at, more in [*moments, (seconds, 0)]:
        until = min(at, seconds)
        if there and until > since and (found := rates.best(there)):
            steps += (until - since) / found[0].seconds
        since, there = max(since, until), there + more
    return steps


def row(model: str, path: str, hours: float) -> str:
    profile, trace = read_profile(f"{model}-v100"), read_trace(path)
    document = manifest(profile, most_nodes(trace))
    spec = parse_manifest(document)
    seconds = min(trace.duration, hours * HOUR)
    profile = for_microbatch(profile, spec.training.micro_batch_size)
    made = JobRun(spec=spec, manifest=document, profile=profile, trace=trace, seconds=seconds)
    found = simulate_job(made).figures
    rates = GridRates(profile.figures, spec, profile.machine.memory)
    best = bound(rates, trace, seconds, profile.times.start)
    batch = spec.training.global_batch_size
    share = f"{found.steps / best:.3f}" if best else "nothing fits"
    return (
        f"| {Path(path).stem} | {model} | {found.nodes:.1f} | {found.preemptions} | {found.restores} "
        f"| {found.steps * batch / seconds:.1f} | {best * batch / seconds:.1f} | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="FILE")
    parser.add_argument("--models", default=",".join(MODELS), help=f"with commas; default: {','.join(MODELS)}")
    parser.add_argument("--hours", type=float, default=24.0, help="of each recording, at most")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    print("| Recording | Model | Nodes | Losses | Restores | Samples/s | Bound | Share |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with ProcessPoolExecutor() as pool:
        made = [
            pool.submit(row, model, path, arguments.hours)
            for path in arguments.traces
            for model in arguments.models.split(",")
        ]
        for one in made:
            print(one.result(), flush=True)


if __name__ == "__main__":
    main()
