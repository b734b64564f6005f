"""Which way large bodies travel, by `spec.topology`."""

import torch

from bamboo_core.job.placement_spec import TransportType
from bamboo_core.job.spec import TopologySpec
from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport.bodies import BodyChannel
from bamboo_trainer.transport.nixl.agent import Nixl
from bamboo_trainer.transport.nixl.gpu_direct import direct_way
from bamboo_trainer.transport.one_sided.channel import OneSidedChannel
from bamboo_trainer.transport.stripes import FlowChannel


def body_channel(topology: TopologySpec, worker: WorkerId, device: torch.device) -> BodyChannel:
    """device: the worker's first one. Raises TransportUnavailable if this machine does not have the transport."""
    if topology.transport is not TransportType.NIXL:
        return FlowChannel(topology.flows_per_link)
    way = Nixl()
    direct = direct_way(device) if topology.gpu_direct and device.type == "cuda" else None
    return OneSidedChannel(worker, way, direct)
