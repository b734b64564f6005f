"""The placement of a job's workers: node pools, spread and pods. Frozen values of the manifest; see `spec`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

from bamboo_core.job.forms import Integer, Quantities, TextOf, Tree
from bamboo_core.job.model import Mark
from bamboo_core.job.text_patterns import DECIMAL, DNS_LABEL, IMAGE

MOST_WORKERS_PER_NODE = 64
MANY = 1 << 20  # workers, in a pool without maxWorkers
MOST_DEVICES = 16  # of a worker
GPU_SUFFIX = "/gpu"  # of the resources that are GPUs: nvidia.com/gpu, amd.com/gpu


class Capacity(StrEnum):
    SPOT = "Spot"
    ON_DEMAND = "OnDemand"


class Preset(StrEnum):
    """The cloud or provisioner whose node labels the operator selects and whose taints it tolerates."""

    NONE = "None"
    EKS = "EKS"
    KARPENTER = "Karpenter"
    GKE = "GKE"
    AKS = "AKS"


class SpreadPolicy(StrEnum):
    """The policy for placing workers in zones, and for choosing neighbours.

    Interleave: pods over all zones, neighbouring stages in different ones. ZonePerPipeline: each pipeline in one zone,
    different ones if possible; if the coordinator chooses the stages of several pipelines, pods are spread as with
    Interleave (`spec.pod_spread`). SingleZone: the whole job in one zone.
    """

    INTERLEAVE = "Interleave"
    ZONE_PER_PIPELINE = "ZonePerPipeline"
    SINGLE_ZONE = "SingleZone"

    @property
    def packs(self) -> bool:
        """Return whether a pipeline's workers share a zone to avoid traffic, instead of spreading over zones."""
        return self in (SpreadPolicy.ZONE_PER_PIPELINE, SpreadPolicy.SINGLE_ZONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """A pool of nodes for workers, with its capacity, price and pod template."""

    name: Annotated[str, DNS_LABEL]
    """The name of the pool, a DNS label, unique in the list."""
    capacity: Capacity = Capacity.SPOT
    """Whether nodes may be taken away (Spot) or stay (OnDemand)."""
    preset: Preset = Preset.NONE
    """The cloud or provisioner whose labels and taints the nodes have. None: the worker's template selects nodes."""
    price_per_hour: Annotated[Decimal | None, TextOf(DECIMAL, Decimal)] = None
    """The hourly price of one worker, which is its share of the node's price: a decimal number in quotes, such as
    "0.91", in any currency. An edit counts from then on.
    """
    after_seconds: Annotated[int, Integer(0)] = 0
    """Seconds that a pod waits for a node in the pools before this one. Workers of this pool move back as soon as an
    earlier pool has nodes again.
    """
    max_workers: Annotated[int | None, Integer()] = None
    """The most workers in this pool. By default without limit."""
    template: Annotated[Mapping[str, Any], Tree()] = field(default_factory=dict)
    """A template that is merged over worker.template for the pods of this pool, such as with another GPU's resource,
    image, environment, tolerations or node selectors.
    """


def pool_price(pools: Iterable[NodePool], capacity: Capacity) -> float | None:
    """Return the hourly price of a worker in the first pool of that capacity that has a price; None if none has."""
    prices = (pool.price_per_hour for pool in pools if pool.capacity is capacity)
    return next((float(price) for price in prices if price is not None), None)


def next_prices(pools: Sequence[NodePool], counts: Mapping[str, int]) -> tuple[tuple[float, int], ...]:
    """Return (hourly price of a worker, room for workers) of each pool with a price and room, in the order in which
    the pools would supply workers: from the last pool that has workers on, then the pools before it, which are full or
    deliver nothing. Pools after one without maxWorkers are left out. counts: the current number of workers by pool.
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
    """Return the hourly price of a worker without a pool, as in `bamboo run`: the price of the first pool that has one.
    None if no pool has a price.
    """
    return next((float(pool.price_per_hour) for pool in pools if pool.price_per_hour is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSpec:
    """The spread of workers over zones and nodes. Workers of one node are lost together."""

    policy: SpreadPolicy = SpreadPolicy.INTERLEAVE
    """Interleave spreads the pods over zones and nodes, with neighbouring stages in different zones: nearly all traffic
    crosses zones, which most clouds bill. ZonePerPipeline keeps each pipeline in a zone; with two or more pipelines the
    loss of a zone costs no step. SingleZone keeps the job in one zone; if that zone is lost, the job goes back to its
    checkpoint. With SingleZone, and with ZonePerPipeline unless elastic chooses the stages, a pod waits if its zone has
    no more nodes.
    """
    workers_per_node: Annotated[int, Integer(1, MOST_WORKERS_PER_NODE)] = 1
    """The number of the job's workers for which a node has room, such as one for each GPU. With more than one, nodes
    are filled, and neighbouring stages and replicas are on different nodes where possible.
    """

    def node_price(self, worker_price: Decimal | float | None) -> float | None:
        """Return the price of a node full of workers that cost `worker_price` each; None if that is None."""
        return None if worker_price is None else float(worker_price) * self.workers_per_node

    def nodes(self, workers: int) -> int:
        """Return the number of nodes that `workers` workers need."""
        return -(-workers // self.workers_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """The resources of a worker's container: Kubernetes quantities by resource name."""

    limits: Annotated[Mapping[str, str | int], Quantities()] = field(default_factory=dict)
    """The most that the container may use, by resource name, such as nvidia.com/gpu or memory."""
    requests: Annotated[Mapping[str, str | int], Quantities()] = field(default_factory=dict)
    """The resources that the container is guaranteed, by resource name. The default is the limits."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the requested numbers of GPUs as text, one for each entry of limits and requests that names a GPU
        resource.
        """
        asked = (*self.limits.items(), *self.requests.items())
        return tuple(str(quantity) for name, quantity in asked if name.endswith(GPU_SUFFIX))

    @property
    def asks_for_gpus(self) -> bool:
        return any(quantity != "0" for quantity in self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The pods that workers run in. devices: see docs/design/devices.md."""

    image: Annotated[str | None, IMAGE] = None
    """The container image, with the task's module in it. By default the operator's."""
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    """Resources of a worker's container."""
    template: Annotated[Mapping[str, Any], Tree()] = field(default_factory=dict)
    """Fields merged into the worker's PodTemplateSpec, whose container is called trainer; limited as task.config is."""
    devices: Annotated[int, Integer(1, MOST_DEVICES), Mark.WHILE_SUSPENDED] = 1
    """The number of GPUs of a worker (nvidia.com/gpu), each of which runs a part of its stage; a stage has at least as
    many layers.
    """
