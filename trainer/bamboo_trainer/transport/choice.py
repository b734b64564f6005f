"""Which way large bodies travel, by `spec.topology`."""

from bamboo_core.job.placement_spec import TransportType
from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport.bodies import BodyChannel
from bamboo_trainer.transport.nixl.agent import Nixl
from bamboo_trainer.transport.one_sided.channel import OneSidedChannel
from bamboo_trainer.transport.stripes import FlowChannel


def body_channel(transport: TransportType, worker: WorkerId, flows: int) -> BodyChannel:
    """flows: connections of a link, if bodies travel on these. Raises TransportUnavailable if this machine does not
    have the transport.
    """
    return OneSidedChannel(worker, Nixl()) if transport is TransportType.NIXL else FlowChannel(flows)
