"""Profiles of the six published models on V100 machines (EC2 p3.2xlarge), for `bamboo simulate`.

    python bench/profiles.py              # client/bamboo/profiles/shipped/*.json
    python bench/profiles.py --only vgg

The publications give the time of a step on a grid, not of a layer, so the script derives the layers' seconds from the
published step on on-demand machines, without redundancy and preemptions. The layers take its time minus all else that
the simulator counts: the pipeline's fill, boundaries on the network, the sum of gradients over the pipelines, the
update. The script finds this rest by simulating the step with faster and slower layers, and distributes it over the
layers in proportion to the operations that `bamboo_trainer.tasks.inspection` counts. The forward gets a third, or a
quarter if the backward repeats it. Bytes are counted from the layers, on tensors without data.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import typer

from _common import say, show
from bamboo.profiles.files import FOLDER
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo_core.planning.grid import initial_plan, layer_ranges
from bamboo_core.planning.plan import Peer
from bamboo_core.planning.profile import (
    Layer,
    Machine,
    ModelProfile,
    Network,
    Prices,
    ProfiledTask,
    Published,
    Source,
    Storage,
    Times,
    to_json,
)
from bamboo_core.planning.steps.step_times import StepModel
from bamboo_trainer.loading import load_task
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.ties import settled
from nsdi2023.workloads import (
    CREATION_MS,
    GLOBAL_RENDEZVOUS_MS,
    ON_DEMAND_USD,
    SPOT_USD,
    WORKLOADS,
    Workload,
)

sys.path.append(str(Path(__file__).parents[1] / "examples"))
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-2": ("bamboo_trainer.models.gpt2:build", {"size": "xl", "data": {"length": 1024}, "checkpoint": True}),
    "bert": ("bamboo_trainer.models.bert:build", {"size": "large", "data": {"length": 512}}),
    "resnet": ("resnet:build", {"size": "152"}),
    "gnmt": ("translation:build", {"size": "16"}),
    "vgg": ("nsdi2023.models:vgg", {}),
    "alexnet": ("nsdi2023.models:alexnet", {}),
}
BLOCKS = {"gpt-2": 48, "bert": 24}  # equal ones, which are counted once
T = TypeVar("T")
LEAST = 0.05  # part of an ideal pipeline's seconds that must remain
PIPELINES = 4  # of the published grids, on spot and on-demand machines
FORWARD, REPEATED_FORWARD = 1 / 3, 1 / 4  # share of forward and backward together; if the backward repeats forwards
FLOW, MACHINE = 5e9 / 8, 10e9 / 8
LATENCY = 0.001
MEMORY_BANDWIDTH = 900e9
UPDATE_BYTES = 28  # moved per parameter: weight, gradient and two moments are read, all but the gradient written


def run(only: Annotated[str | None, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = None) -> None:
    """Derive each model's profile and write it to a file."""
    torch.set_num_threads(1)  # a forked process, which counts, would wait for the others in vain
    rows = []
    for name in (name for name in CONFIGS if only in (None, name)):
        say(name)
        profile = profile_of(WORKLOADS[name])
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}-v100.json").write_bytes(to_json(profile))
        seconds = sum(layer.forward + layer.backward for layer in profile.layers)
        rows.append([name, str(len(profile.layers)), str(profile.samples), f"{seconds * 1000:.1f}"])
    show("profiles", ["model", "layers", "samples", "ms a microbatch"], rows)


def microbatch(workload: Workload) -> int:
    """Return the most samples per microbatch that give a pipeline two or more equal microbatches per stage; else 1."""
    share = workload.samples // PIPELINES
    fitting = [size for size in range(1, share + 1) if share % size == 0 and share // size >= 2 * workload.stages]
    return max(fitting, default=1)


def whole_seconds(workload: Workload, samples: int) -> float:
    """Return an upper bound s of a microbatch's seconds: M of them on P stages take at least s * (M + P - 1) / P."""
    stages, count = workload.on_demand_gpus // PIPELINES, workload.samples // PIPELINES // samples
    return workload.on_demand_seconds * stages / (count + stages - 1)


def paced(profile: ModelProfile) -> ModelProfile:
    """Scale the layers' times to the published on-demand step. Raises RuntimeError if it leaves no time for them."""
    published = profile.published
    assert published is not None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        late = on_demand_step(scaled(profile, middle)) > published.on_demand_seconds
        low, high = (low, middle) if late else (middle, high)
    if low < LEAST:
        raise RuntimeError(f"{profile.name}: the published step leaves no time for its layers")
    return scaled(profile, low)


class OneConnection(Network, frozen=True, kw_only=True):
    """A network with one connection per link, as in the published measurements."""

    def link(self, size: float) -> float:
        return self.flow


def on_demand_step(profile: ModelProfile) -> float:
    """Return the seconds of a step on the published on-demand grid, as `bamboo simulate JOB.yaml` computes it, but with
    one connection per link and one gradient sum per pipeline.
    """
    published = profile.published
    assert published is not None
    grid = {"stages": published.on_demand_stages, "pipelines": published.on_demand_pipelines}
    training = {"steps": 1, "globalBatchSize": published.batch, "microBatchSize": profile.samples}
    training["gradientGroups"] = published.on_demand_pipelines
    spec = _manifest("x:y", {}, training, topology=grid, redundancy={"mode": "None"})
    stages, pipelines = layer_ranges(profile.costs, spec.topology), spec.topology.pipelines
    peers = [Peer(worker=f"w{i}", host="", port=0) for i in range(len(stages) * pipelines)]
    schedule = spec.topology.first_schedule
    plan = initial_plan(peers, stages, pipelines, spec.training, spec.redundancy, schedule=schedule)
    network = OneConnection(**msgspec.structs.asdict(profile.network))
    figures = msgspec.structs.replace(profile.figures, network=network)
    return StepModel(figures, spec).seconds(plan, plan.target)


def scaled(profile: ModelProfile, factor: float) -> ModelProfile:
    layers = (
        msgspec.structs.replace(
            layer, forward=_rounded(layer.forward * factor), backward=_rounded(layer.backward * factor)
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=tuple(layers))


def profile_of(workload: Workload) -> ModelProfile:
    entrypoint, config = CONFIGS[workload.name]
    samples = microbatch(workload)
    one, blocks = ({**config, "blocks": 1}, BLOCKS[workload.name]) if workload.name in BLOCKS else (config, 1)
    task = settled(load_task(entrypoint, one), 0)
    costs, seconds = _repeated(layer_costs(task, samples), blocks), whole_seconds(workload, samples)
    sizes = _repeated(measure(task, _spec(entrypoint, one, samples)), blocks)
    share = REPEATED_FORWARD if config.get("checkpoint") else FORWARD
    layers = tuple(
        Layer(
            forward=_rounded(share * seconds * cost / sum(costs)),
            backward=_rounded((1 - share) * seconds * cost / sum(costs)),
            update=_rounded(UPDATE_BYTES * size.parameters / MEMORY_BANDWIDTH),
            **msgspec.structs.asdict(size.bytes),
            cost=cost,
        )
        for cost, size in zip(costs, sizes, strict=True)
    )
    profile = ModelProfile(
        name=f"{workload.name}-v100",
        device="NVIDIA V100 16 GB (EC2 p3.2xlarge)",
        samples=samples,
        layers=layers,
        network=Network(flow=FLOW, machine=MACHINE, latency=LATENCY),
        storage=Storage(write=FLOW, read=FLOW, latency=LATENCY),
        times=Times(
            start=CREATION_MS / 1000,
            detection=HEARTBEAT_TIMEOUT_SECONDS,
            rendezvous=GLOBAL_RENDEZVOUS_MS / 1000,
            regroup=workload.local_rendezvous_ms / 1000,
        ),
        machine=Machine(memory=16 * 10**9, host_memory=61 * 10**9),
        prices=Prices(spot=SPOT_USD, on_demand=ON_DEMAND_USD),
        published=_published(workload),
        task=ProfiledTask(entrypoint=entrypoint, config=config),
        sources=_sources(workload, samples),
    )
    return paced(profile)


def _repeated(layers: Sequence[T], blocks: int) -> tuple[T, ...]:
    """Return the layers with the second one repeated `blocks` times."""
    return (*layers[:1], *(layers[1] for _ in range(blocks)), *layers[2:])


def _published(workload: Workload) -> Published:
    return Published(
        batch=workload.samples,
        stages=workload.stages,
        pipelines=PIPELINES,
        on_demand_stages=workload.on_demand_gpus // PIPELINES,
        on_demand_pipelines=PIPELINES,
        on_demand_seconds=workload.on_demand_seconds,
        step_seconds={str(count): ms / 1000 for count, ms in sorted(workload.step_ms.items())},
        steps=workload.steps,
    )


def _sources(workload: Workload, samples: int) -> dict[str, Source]:
    stages, count = workload.on_demand_gpus // PIPELINES, workload.samples // PIPELINES // samples
    simulator, repeats = "the published Bamboo simulator (NSDI 2023)", "checkpoint" in CONFIGS[workload.name][1]
    return {
        "layers.seconds": Source(
            text=f"a step of {workload.samples} samples on {workload.on_demand_gpus} on-demand V100s takes"
            f" {workload.on_demand_seconds:g} s in {simulator}; taken to be 1F1B on {PIPELINES} x {stages} with {count}"
            f" microbatches of {samples} each, of which the layers take what is left when the simulator has counted"
            " boundaries, the sum of gradients and the update; dealt to the layers by counted operations, a"
            f" {'quarter to the forward, which the backward repeats' if repeats else 'third to the forward'}."
            " The grid and the microbatch are assumed, too. So whatever else that system lost is in it; what a V100"
            f" takes by its figures is {workload.name}@v100",
            estimated=True,
        ),
        "layers.update": Source(
            text=f"{UPDATE_BYTES} bytes moved for each parameter at the 900 GB/s of the V100's data sheet",
            estimated=True,
        ),
        "layers.bytes": Source(
            text=f"counted from {CONFIGS[workload.name][0]} with {CONFIGS[workload.name][1]}, in fp32, on tensors"
            " without data"
        ),
        "network": Source(
            text="EC2 limits a connection to 5 Gb/s outside of a cluster placement group; that a machine has twice"
            " as much for all of its connections, and a latency of 1 ms between zones, is assumed",
            estimated=True,
        ),
        "storage": Source(text="assumed to be as fast as one connection", estimated=True),
        "times": Source(
            text=f"start, rendezvous and regroup: creation of a node, global and local rendezvous of {simulator};"
            " detection: Bamboo's heartbeat timeout, as of a machine that vanishes without closing its connections"
        ),
        "memory": Source(text="of a p3.2xlarge, as the published system's paper says"),
        "prices": Source(text=f"of {simulator}"),
        "published": Source(
            text=f"{simulator}; that the on-demand grid had {PIPELINES} pipelines, as that on spot machines, is assumed"
        ),
    }


def _spec(entrypoint: str, config: dict[str, Any], samples: int) -> JobSpec:
    training = {"steps": 1, "globalBatchSize": samples, "microBatchSize": samples}
    return _manifest(entrypoint, config, training, topology={"stages": 1})


def _manifest(entrypoint: str, config: dict[str, Any], training: dict[str, Any], **more: Any) -> JobSpec:
    return parse_manifest(
        {
            "apiVersion": "bamboo.dev/v1alpha1",
            "kind": "BambooJob",
            "metadata": {"name": "profile"},
            "spec": {"task": {"entrypoint": entrypoint, "config": config}, "training": training, **more},
        }
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


if __name__ == "__main__":
    typer.run(run)
