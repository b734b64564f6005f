"""Where a job's workers run, as what pods and how connected: frozen values of the manifest; see `bamboo.job.spec`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any

MOST_WORKERS_PER_NODE = 64
MANY = 1 << 20  # workers, in a pool without maxWorkers
MOST_DEVICES = 16  # of a worker
GPU_SUFFIX = "/gpu"  # of the resources that are GPUs: nvidia.com/gpu, amd.com/gpu


class TransportType(StrEnum):
    """How tensors travel between workers. NIXL: large ones by NVIDIA's library, over RDMA, EFA or shared memory."""

    TCP = "TCP"
    NIXL = "NIXL"


class Capacity(StrEnum):
    SPOT = "Spot"
    ON_DEMAND = "OnDemand"


class Preset(StrEnum):
    """Whose node labels and taints the operator selects and tolerates."""

    NONE = "None"
    EKS = "EKS"
    KARPENTER = "Karpenter"
    GKE = "GKE"
    AKS = "AKS"


class SpreadPolicy(StrEnum):
    """Where workers are, and who follows whom. Interleave: pods over all zones, neighbours in the ring in different
    ones. ZonePerPipeline: each pipeline in one zone, different ones if possible. SingleZone: the whole job in one zone.
    With ZonePerPipeline and a grid that the coordinator chooses, pods are spread as with Interleave: `spec.pod_spread`.
    None: pods wherever the scheduler likes, and among these neighbours as with Interleave.
    """

    INTERLEAVE = "Interleave"
    ZONE_PER_PIPELINE = "ZonePerPipeline"
    SINGLE_ZONE = "SingleZone"
    NONE = "None"

    @property
    def packs(self) -> bool:
        """Are a pipeline's workers to be in the same zone, so that little crosses zones, instead of in many?"""
        return self in (SpreadPolicy.ZONE_PER_PIPELINE, SpreadPolicy.SINGLE_ZONE)


class DisruptionBudget(StrEnum):
    """How many workers voluntary evictions, such as a drain's, may take at a time."""

    ONE_AT_A_TIME = "OneAtATime"
    NONE = "None"


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when the job ends."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class VerifyMode(StrEnum):
    """What is done about results that have to be the same and are not; see docs/design/verify.md.

    Report: it is told. Replace: whose results are wrong is replaced, and the job goes back to a checkpoint from before.
    """

    NONE = "None"
    REPORT = "Report"
    REPLACE = "Replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Pools are tried in order. after_seconds: how long the pools before it must have failed to deliver.

    revert: move its workers back to an earlier pool once that one has capacity again. machine: the name of its nodes in
    a price list, by which price_per_hour, of a worker, follows what an operator reads.
    """

    name: str
    capacity: Capacity = Capacity.SPOT
    preset: Preset = Preset.NONE
    price_per_hour: Decimal | None = None
    machine: str | None = None
    after_seconds: int = 0
    max_workers: int | None = None
    revert: bool = False


def priced_pool(pools: Iterable[NodePool], capacity: Capacity) -> NodePool | None:
    """The first pool of that capacity that says a price: it counts for the job's others."""
    return next((pool for pool in pools if pool.capacity is capacity and pool.price_per_hour is not None), None)


def pool_price(pools: Iterable[NodePool], capacity: Capacity) -> float | None:
    """USD per hour for a worker in the pools of that capacity, if one of them says it."""
    pool = priced_pool(pools, capacity)
    return None if pool is None or pool.price_per_hour is None else float(pool.price_per_hour)


def next_prices(pools: Sequence[NodePool], counts: Mapping[str, int]) -> tuple[tuple[float, int], ...]:
    """What more workers would cost in an hour, and how many at each price, in the order in which they would come.

    Where workers are in a later pool, those before it are full or deliver nothing. counts: workers by pool.
    """
    first = max((index for index, pool in enumerate(pools) if counts.get(pool.name)), default=0)
    found: list[tuple[float, int]] = []
    for pool in (*pools[first:], *pools[:first]):
        room = MANY if pool.max_workers is None else pool.max_workers - counts.get(pool.name, 0)
        if pool.price_per_hour is not None and room > 0:
            found.append((float(pool.price_per_hour), room))
        if pool.max_workers is None:
            break
    return tuple(found)


def one_price(pools: Iterable[NodePool]) -> float | None:
    """USD per hour for a worker that is in no pool, as of `bamboo run`: what the first pool says that has a price."""
    return next((float(pool.price_per_hour) for pool in pools if pool.price_per_hour is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSpec:
    """workers_per_node: how many of the job's workers a node has room for; they are lost together."""

    topology_key: str = "topology.kubernetes.io/zone"
    policy: SpreadPolicy = SpreadPolicy.INTERLEAVE
    workers_per_node: int = 1

    def node_price(self, worker_price: Decimal | float | None) -> float | None:
        """Of a node with all its workers, by what a pool says for one of them: its share of the node."""
        return None if worker_price is None else float(worker_price) * self.workers_per_node

    def nodes(self, workers: int) -> int:
        """For so many workers."""
        return -(-workers // self.workers_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """Kubernetes quantities by resource name."""

    limits: Mapping[str, str | int] = field(default_factory=dict)
    requests: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[str, ...]:
        """How many GPUs are asked for, each time that a number of them is said."""
        asked = (*self.limits.items(), *self.requests.items())
        return tuple(str(quantity) for name, quantity in asked if name.endswith(GPU_SUFFIX))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """template: overrides merged into the worker's PodTemplateSpec; see pod_fields for what is checked of it.

    allow_mixed_platforms: workers may differ in what decides bits, such as the GPU's model; see control.platform.
    devices: of each worker, which runs its stage in so many parts, one on each; see docs/design/devices.md.
    """

    image: str | None = None
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    template: Mapping[str, Any] = field(default_factory=dict)
    allow_mixed_platforms: bool = False
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """How workers are replaced whose pods are not as they would be made now.

    max_surge: workers more than wanted meanwhile. progress_deadline_seconds: for a new worker to be ready.
    """

    paused: bool = False
    max_surge: int = 1
    progress_deadline_seconds: int = 600
