"""How much longer a step takes in which a worker is lost and not replaced: the real coordinator in virtual time.

    python bench/loss.py --stages 4 --microbatches 32 [--pipelines 2] [--fixed]

Each stage loses its worker at evenly spread moments of a step. The coordinator chooses the stages, so a step may begin
anew on a smaller grid; with --fixed it keeps the grid. Layers take equal times, and a state of a stage moves in a
hundredth of a step.
"""

import statistics
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import typer

from bamboo.profiles.files import read_profile
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.trace import Change, NodeChange, make_trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import Layer, ModelProfile, Network

STEP: Final = 2.0  # seconds, about
LAYERS: Final = 84  # divisible by 2, 3, 4, 6 and 7
NETWORK: Final = Network(flow=3e9, machine=6e9, latency=2e-4)
DETECTION: Final = 0.02  # seconds until a loss is known
AFTER: Final = 50  # steps until it


def profile(stages: int, microbatches: int) -> ModelProfile:
    seconds = STEP / (microbatches + stages - 1) * stages / LAYERS
    size = round(NETWORK.flow * STEP / 100 * stages / LAYERS)
    layer = Layer(
        forward=seconds / 3,
        backward=seconds * 2 / 3,
        parameters=size // 3,
        optimizer=size * 2 // 3,
        gradients=size // 3,
        boundary=1000,
    )
    known = read_profile("gpt-2-v100")
    times = msgspec.structs.replace(known.times, start=1.0, detection=DETECTION)
    return msgspec.structs.replace(known, layers=(layer,) * LAYERS, network=NETWORK, times=times)


def extras(made: ModelProfile, document: dict[str, Any], workers: int, moments: int) -> Iterator[float]:
    """Yield the extra time of each loss, in steps."""

    def steps(seconds: float, *losses: NodeChange) -> list[tuple[float, float, float]]:
        nodes = [NodeChange(at=0.0, change=Change.ADD, node=f"n{number}") for number in range(workers)]
        trace = make_trace([*nodes, *losses], duration=seconds)
        run = JobRun(spec=parse_manifest(document), manifest=document, profile=made, trace=trace)
        return list(simulate_job(run).steps)

    since, until, count = steps(200 * STEP)[-1]
    calm = (until - since) / count
    since += AFTER * calm
    for number in range(workers):
        for moment in range(moments):
            at = since + (moment + 0.5) / moments * calm
            lost = NodeChange(at=at, change=Change.REMOVE, node=f"n{number}")
            ends = [end for _, end, _ in steps(at + 20 * STEP, lost) if end > at]
            yield (ends[0] - since) / calm - 1


def command(
    stages: Annotated[int, typer.Option(min=2)] = 4,
    pipelines: Annotated[int, typer.Option(min=1)] = 1,
    microbatches: Annotated[int, typer.Option(min=1, help="Of each pipeline in a step.")] = 32,
    moments: Annotated[int, typer.Option(min=1, help="Of a step at which a worker of each cell is lost.")] = 20,
    fixed: Annotated[bool, typer.Option("--fixed", help="Keep the grid.")] = False,
) -> None:
    """Print the extra time of a loss, in steps."""
    workers = stages * pipelines
    grid: dict[str, Any] = {"topology": {"pipelines": pipelines, "schedule": "1F1B"}}
    if fixed:
        grid["topology"]["stages"] = stages
    else:
        grid["elastic"] = {"maxWorkers": workers}
    document = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "loss"},
        "spec": {
            "task": {"entrypoint": "loss:build"},
            "training": {"steps": 100_000, "globalBatchSize": microbatches * pipelines, "microBatchSize": 1},
            **grid,
        },
    }
    found = sorted(extras(profile(stages, microbatches), document, workers, moments))
    mean, ninety = statistics.mean(found), found[int(0.9 * len(found))]
    print(f"{len(found)} losses: mean {mean:.2f}, 90 % {ninety:.2f}, most {found[-1]:.2f} steps")


if __name__ == "__main__":
    typer.run(command)
