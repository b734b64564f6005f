"""Specifications of the test cluster's nodes, for tests and for the host process."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"
CAPACITY_TYPE = "karpenter.sh/capacity-type"
SPOT_TAINT = {"key": "bamboo.dev/spot", "value": "true", "effect": "NoSchedule"}
CAPACITY = {"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    capacity: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


def spot(name: str, zone: str, gpus: int = 8) -> NodeSpec:
    return NodeSpec(
        name=name, labels={ZONE: zone, CAPACITY_TYPE: "spot"}, taints=(SPOT_TAINT,), capacity={GPU: str(gpus)}
    )


def on_demand(name: str, zone: str, gpus: int = 8) -> NodeSpec:
    return NodeSpec(name=name, labels={ZONE: zone, CAPACITY_TYPE: "on-demand"}, capacity={GPU: str(gpus)})


def usual_nodes() -> list[NodeSpec]:
    """Return a spot node in each of zones a, b and c, and an on-demand node in zone a. kind.yaml lacks spot-a."""
    return [*(spot(f"spot-{zone}", f"zone-{zone}") for zone in "abc"), on_demand("on-demand-a", "zone-a")]
