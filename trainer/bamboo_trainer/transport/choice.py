"""Which way large bodies travel, by `spec.topology.transport`."""

from bamboo.job.placement_spec import TransportType
from bamboo.planning.plan import WorkerId
from bamboo_trainer.transport.bodies import BodyChannel
from bamboo_trainer.transport.nixl.channel import NixlChannel


def body_channel(transport: TransportType, worker: WorkerId) -> BodyChannel | None:
    """None: on the links' own connections. Raises TransportUnavailable if this machine does not have it."""
    return NixlChannel(worker) if transport is TransportType.NIXL else None
