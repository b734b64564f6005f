"""The six models of the published simulator, with their measured times on V100 GPUs (p3 nodes)."""

from dataclasses import dataclass, replace

from bamboo.simulation.figures import SimulationError

CREATION_MS = 45_000  # from the moment that a node is billed until it is ready
GLOBAL_RENDEZVOUS_MS = 30_000
SLOWDOWN = 1.5  # of a step while a node runs two stages
SPOT_USD = 0.91
ON_DEMAND_USD = 3.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A published model on a grid of at most four pipelines."""

    name: str
    stages: int
    capacity: int
    samples: int
    step_ms: dict[int, int]  # of a step, by the number of pipelines
    local_rendezvous_ms: int
    # on_demand_seconds, on_demand_gpus: of a step on on-demand GPUs, and their number
    on_demand_seconds: float
    on_demand_gpus: int
    steps: int | None = None  # of a whole run; None if not published


def _times(one: int, two: int, three: int, four: int) -> dict[int, int]:
    return {1: one, 2: two, 3: three, 4: four}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="gpt-2",
            stages=12,
            capacity=48,
            samples=32,
            step_ms=_times(1200, 1085, 1046, 1008),
            local_rendezvous_ms=20_000,
            on_demand_seconds=3.37,
            on_demand_gpus=32,
            steps=188_828,
        ),
        Workload(
            name="bert",
            stages=12,
            capacity=48,
            samples=264,
            step_ms=_times(4310, 2390, 1805, 1450),
            local_rendezvous_ms=20_000,
            on_demand_seconds=2.51,
            on_demand_gpus=20,
            steps=22_194,
        ),
        Workload(
            name="resnet",
            stages=8,
            capacity=32,
            samples=384,
            step_ms=_times(6100, 3200, 2400, 1600),
            local_rendezvous_ms=10_000,
            on_demand_seconds=1.30,
            on_demand_gpus=20,
        ),
        Workload(
            name="gnmt",
            stages=6,
            capacity=24,
            samples=288,
            step_ms=_times(3100, 1660, 1185, 950),
            local_rendezvous_ms=10_000,
            on_demand_seconds=0.90,
            on_demand_gpus=16,
        ),
        Workload(
            name="vgg",
            stages=6,
            capacity=24,
            samples=384,
            step_ms=_times(9300, 4900, 3440, 2750),
            local_rendezvous_ms=5_000,
            on_demand_seconds=2.20,
            on_demand_gpus=16,
        ),
        Workload(
            name="alexnet",
            stages=6,
            capacity=24,
            samples=384,
            step_ms=_times(6180, 3100, 2000, 1550),
            local_rendezvous_ms=5_000,
            on_demand_seconds=1.60,
            on_demand_gpus=16,
        ),
    )
}
BERT_STEP_MS = {8: _times(5700, 3100, 2300, 1770), 15: _times(12_750, 6600, 4780, 3700)}


def workload_of(name: str, stages: int | None = None) -> Workload:
    """Return a published workload. Raises SimulationError, which lists the known ones, for an unknown name or number of
    stages. stages: replaces the published number; only BERT was measured with others (8 and 15).
    """
    if name not in WORKLOADS:
        raise SimulationError(f"expected one of {', '.join(WORKLOADS)}, got {name!r}")
    found = WORKLOADS[name]
    if stages is None or stages == found.stages:
        return found
    times = BERT_STEP_MS.get(stages) if name == "bert" else None
    if times is None:
        known = "8, 12 and 15" if name == "bert" else str(found.stages)
        raise SimulationError(f"{stages} stages: step times of {name} are known for {known} stages")
    return replace(found, stages=stages, step_ms=times)
